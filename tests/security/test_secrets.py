"""Secret keys: parsed strictly, bounded, from safe locations only, and never shown."""

from __future__ import annotations

import base64
import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.config.model import EncryptionConfig
from lmcache_async.config.secrets import read_secrets
from lmcache_async.engine.sync import LMCacheEngineMetadata
from lmcache_async.errors import ConfigError
from lmcache_async.testing.rig import Rig
from tests.support.secret_files import secret_file

KEY = bytes(range(32))
OTHER = bytes(range(100, 132))
FORMS = [
    KEY.hex(),
    KEY.hex().upper(),
    base64.b64encode(KEY).decode(),
    base64.urlsafe_b64encode(bytes(range(224, 256))).decode().rstrip("="),
]


def read(**sources):
    config = load_config(**{"env": {}, **sources})
    return config.read_hash_key(), config.encryption.read_keys()


def message(**sources):
    with pytest.raises(ConfigError) as caught:
        read(**sources)
    return str(caught.value)


@pytest.mark.parametrize("text", FORMS)
def test_a_key_is_read_in_every_form_from_either_place(tmp_path, text):
    from_variable = load_config(env={"LMCACHE_ASYNC_ENCRYPTION__KEYS": text}).encryption.read_keys()
    from_file = load_config(
        env={}, extra={"encryption.key_file": str(secret_file(tmp_path, text))}
    ).encryption.read_keys()

    assert from_file == from_variable
    assert len(from_file[0]) == 32


def test_several_keys_with_comments_in_a_file_and_in_a_variable(tmp_path):
    path = secret_file(tmp_path, f"# new, since May\n{OTHER.hex()}\n\n  # old\n{KEY.hex()}\n")

    config = load_config(env={"LMCACHE_ASYNC_ENCRYPTION__KEYS": f"{OTHER.hex()}, {KEY.hex()}"})

    assert read_secrets(None, path, "keys", "key_file") == (OTHER, KEY)
    assert config.encryption.read_keys() == (OTHER, KEY)


def test_empty_variables_set_no_secret():
    config = load_config(env={"LMCACHE_ASYNC_HASH_KEY": "", "LMCACHE_ASYNC_ENCRYPTION__KEYS": " "})

    assert config.read_hash_key() == b""
    assert not config.encryption.enabled
    assert config.encryption.read_keys() == ()


def test_a_secret_is_in_no_repr_and_no_dump_of_the_config():
    text = KEY.hex()
    config = load_config(
        env={
            "LMCACHE_ASYNC_HASH_KEY": text,
            "LMCACHE_ASYNC_HASH_ALGORITHM": "sha256",
            "LMCACHE_ASYNC_ENCRYPTION__KEYS": text,
        }
    )

    shown = [
        repr(config),
        str(config),
        str(config.model_dump()),
        config.model_dump_json(),
        repr(config.encryption),
    ]
    assert not [one for one in shown if text in one]
    assert config.read_hash_key() == KEY


@pytest.mark.parametrize(
    "env",
    [
        {"LMCACHE_ASYNC_HASH_KEY": "{0}"},
        {
            "LMCACHE_ASYNC_HASH_KEY": "{0}",
            "LMCACHE_ASYNC_HASH_ALGORITHM": "sha256",
            "LMCACHE_ASYNC_HASH_KEY_FILE": "/x",
        },
        {"LMCACHE_ASYNC_HASH_KEY": "{0}zz", "LMCACHE_ASYNC_HASH_ALGORITHM": "sha256"},
        {"LMCACHE_ASYNC_HASH_KEY": "{0} {0}", "LMCACHE_ASYNC_HASH_ALGORITHM": "sha256"},
        {"LMCACHE_ASYNC_ENCRYPTION__KEYS": "{0} {0}"},
        {"LMCACHE_ASYNC_ENCRYPTION__KEYS": "{0}!"},
        {"LMCACHE_ASYNC_ENCRYPTION__KEYS": "{0}", "LMCACHE_ASYNC_ENCRYPTION__KEY_FILE": "/x"},
        {"LMCACHE_ASYNC_ENCRYPTION": '{{"keys": ["{0}"]}}'},
        {"LMCACHE_ASYNC_ENCRYPTION": '{{"keys": "{0}"'},
        {"LMCACHE_ASYNC_ENCRYPTION": "{0}"},
        {"LMCACHE_ASYNC_ENCRYPTION": '{{"key": "{0}"}}'},
        {"LMCACHE_ASYNC_HASH_KEYS": "{0}"},
    ],
    ids=str,
)
def test_no_message_shows_a_secret(env):
    told = message(env={name: value.format(KEY.hex()) for name, value in env.items()})

    assert KEY.hex()[:8] not in told
    assert any(
        name in told or name.removeprefix("LMCACHE_ASYNC_").lower().replace("__", ".") in told for name in env
    )


@pytest.mark.parametrize("key", ["hash_key", "encryption.keys"])
def test_a_secret_in_a_config_file_or_in_vllms_arguments_is_refused(tmp_path, key):
    path = tmp_path / "config.yaml"
    path.write_text(f'hash_algorithm: sha256\n"{key}": {KEY.hex()}\n')

    for told in (message(path=path), message(extra={key: KEY.hex()})):
        assert f"{key} is a secret" in told
        assert KEY.hex() not in told
        assert "LMCACHE_ASYNC_" in told


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("", 0o600, "there is no key"),
        ("# nothing else\n", 0o600, "there is no key"),
        (KEY.hex()[:-1], 0o600, "key 1 has 63 characters; expected 32 bytes as 64 hex digits"),
        (f"{OTHER.hex()} short", 0o600, "key 2 has 5 characters"),
        (f"{KEY.hex()}\n{KEY.hex()}", 0o600, "the same key is given twice"),
        ("00" * 32, 0o600, "is not a secret"),
        (KEY.hex(), 0o644, "has mode 0644, so all users may read it: chmod 600"),
        ("k" * 70_000, 0o600, "more than 65536 bytes"),
    ],
)
def test_a_file_of_keys_is_read_strictly(tmp_path, text, mode, expected):
    told = message(extra={"encryption.key_file": str(secret_file(tmp_path, text, mode))})

    assert expected in told
    assert str(tmp_path) in told
    assert KEY.hex()[:-1] not in told


def test_a_path_that_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    assert "not a regular file" in message(extra={"encryption.key_file": str(tmp_path / "pipe")})
    assert "Is a directory" in message(extra={"encryption.key_file": str(tmp_path)})
    assert "cannot be read" in message(extra={"encryption.key_file": str(tmp_path / "none")})


def test_a_link_to_a_secret_is_followed_as_kubernetes_mounts_them(tmp_path):
    secret_file(tmp_path, KEY.hex(), 0o440)
    (tmp_path / "link").symlink_to("secret")

    assert read_secrets(None, tmp_path / "link", "keys", "key_file") == (KEY,)


@given(st.text(min_size=9))
def test_any_text_is_keys_or_a_config_error_without_it(text):
    told, keys = "", ()
    try:
        keys = EncryptionConfig(keys=text).read_keys()
    except ConfigError as error:
        told = str(error)

    assert text not in told
    assert all(len(key) == 32 for key in keys)


def test_a_hash_key_needs_a_hash_that_takes_one(tmp_path):
    told = message(extra={"hash_key_file": str(secret_file(tmp_path, KEY.hex()))})

    assert "xxh3_128 takes no hash key; set hash_algorithm to blake3 or sha256" in told


def test_the_facade_keys_its_namespace(tmp_path):
    extra = {"hash_key_file": str(secret_file(tmp_path, KEY.hex())), "hash_algorithm": "blake3"}
    rig, config = Rig(), load_config(env={}, extra=extra)
    namespace = LMCacheEngineMetadata(model_name="m").namespace_of(rig.layout, config)
    plain = LMCacheEngineMetadata(model_name="m").namespace_of(
        rig.layout, load_config(env={}, extra={"hash_algorithm": "blake3"})
    )

    assert namespace.hash_key == KEY
    assert namespace.root() != plain.root()


async def test_an_engine_refuses_a_namespace_without_the_configured_key(tmp_path):
    extra = {"hash_key_file": str(secret_file(tmp_path, KEY.hex())), "hash_algorithm": "blake3"}

    with pytest.raises(
        ConfigError,
        match=r"hash_key: the hash key of the namespace \(none\) is not the configured one: create the .*hash_key=config",
    ):
        async with Rig().open(**extra):
            pass


def test_every_secret_of_the_config_is_known_as_one():
    fields = {("hash_key",), *((("encryption"), name) for name in EncryptionConfig.model_fields)}
    secret = {
        path
        for path in fields
        if "SecretStr"
        in str((EngineConfig if len(path) == 1 else EncryptionConfig).model_fields[path[-1]].annotation)
    }
    from lmcache_async.config.secrets import SECRET_PATHS

    assert secret == set(SECRET_PATHS)
    assert all(re.fullmatch(r"[a-z_.]+", file) for file in SECRET_PATHS.values())
