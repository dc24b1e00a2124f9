"""The s3 tier: options, clients created from them, and redaction of secrets."""

import sys

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from lmcache_async.config import load_config, validate_options
from lmcache_async.errors import ConfigError, MissingDependencyError
from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3.bucket import open_store, reason, tier_error
from lmcache_async.registry import TIERS, Registry
from tests.support.secret_files import secret_file

SECRET = "kept-from-everybody"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", ("s3", "bucket", "")),
        ("s3://bucket/", ("s3", "bucket", "")),
        (" s3://bucket/a//b/ ", ("s3", "bucket", "a/b")),
        ("gs://bucket/kv", ("gs", "bucket", "kv")),
        ("gcs://bucket/kv", ("gs", "bucket", "kv")),
        ("az://container/kv", ("az", "container", "kv")),
        ("azure://container/kv", ("az", "container", "kv")),
    ],
)
def test_a_url_names_a_kind_of_store_a_bucket_and_a_prefix(url, place):
    assert S3Config(url=url).location == place


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "s3:///kv"}, "s3://bucket/prefix"),
        ({"url": "s3://key:secret@bucket"}, "s3://bucket/prefix"),
        ({"url": "s3://host:9000/bucket"}, "s3://bucket/prefix"),
        ({"url": "s3://b/?x=1"}, "s3://bucket/prefix"),
        ({"url": "s3://b", "endpoint": "https://me:pass/word@minio:9000"}, "expected a URL without a user"),
        ({"url": "s3://b", "secret_key": SECRET}, "require each other"),
        ({"url": "az://b", "service_account_file": "/f"}, "service_account_file is only valid for gs://"),
    ],
)
def test_wrong_options_are_refused_by_name(options, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        validate_options(S3Config, options, "here")

    assert SECRET not in str(caught.value)


def test_no_text_contains_a_secret():
    tier = {
        "name": "s3",
        "url": "s3://b",
        "access_key_id": "a",
        "secret_key": SECRET,
        "session_token": SECRET,
    }
    config = load_config(extra={"tiers": [tier]}, env={})
    options = validate_options(S3Config, dict(config.tiers[0].options), "here")

    assert (
        SECRET not in f"{config!r} {config} {options!r} {options} {S3Tier(options)!r} {open_store(options)!r}"
    )


def test_a_client_for_each_kind_of_store(tmp_path):
    secret = secret_file(tmp_path, "c2VjcmV0\n")
    s3 = open_store(
        S3Config(
            url="s3://b/kv",
            endpoint="http://minio:9000",
            allow_http=True,
            access_key_id="a",
            secret_key_file=secret,
            region="eu-central-1",
        )
    )
    google = open_store(S3Config(url="gs://b/kv", anonymous=True))
    azure = open_store(S3Config(url="az://c/kv", account="a", secret_key_file=secret))

    assert isinstance(s3, S3Store)
    assert s3.config["secret_access_key"] == "c2VjcmV0"
    assert s3.retry_config is not None
    assert s3.retry_config["max_retries"] == 0
    assert isinstance(google, GCSStore)
    assert isinstance(azure, AzureStore)
    assert [store.prefix for store in (s3, google, azure)] == ["kv"] * 3


def test_a_secret_in_a_world_readable_file_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    config = S3Config(url="s3://b", access_key_id="a", secret_key_file=secret)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        open_store(config)
    assert SECRET not in str(caught.value)

    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(config.model_copy(update={"secret_key_file": tmp_path / "none"}))


@pytest.mark.parametrize(
    "name",
    ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"],
)
def test_a_line_break_in_a_variable_is_refused_by_name(monkeypatch, name):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv(name, f"{SECRET}\n")
    with pytest.raises(ConfigError, match=f"the variable {name} contains a line break") as caught:
        open_store(S3Config(url="s3://b"))
    assert SECRET not in str(caught.value)

    open_store(S3Config(url="s3://b", region="r", access_key_id="a", secret_key="b"))


@pytest.mark.parametrize("name", ["access_key_id", "secret_key", "session_token", "region"])
def test_a_line_break_in_an_option_is_refused_by_name(name):
    options = {"access_key_id": "a", "secret_key": "b", name: f"{SECRET}\n"}
    with pytest.raises(ConfigError, match=f"{name} contains a line break") as caught:
        open_store(S3Config.model_validate({"url": "s3://b"} | options))
    assert SECRET not in str(caught.value)


def test_errors_of_client_options_show_no_secret():
    with pytest.raises(ConfigError, match="az://c") as caught:
        open_store(S3Config(url="az://c", account="a", secret_key=SECRET + "!"))

    assert caught.value.__cause__ is None
    assert SECRET not in str(caught.value)


def test_a_reason_is_one_line_without_signed_queries():
    error = RuntimeError(
        "Generic S3 error: Error performing GET https://h/b?sig=abc in 1ms - HTTP error: at https://h/b?sig=abc"
        "\n\nDebug source:\nsig=abc"
    )

    assert reason(error) == "HTTP error: at https://h/b"
    assert "sig" not in str(tier_error(error, "read s3://b/x"))
    assert len(reason(RuntimeError("x" * 5000))) == 300


def test_the_error_without_obstore_names_the_package_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("lmcache_async.plugins.s3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'lmcache-async\[s3\]'"):
        Registry().load(TIERS, "s3")
