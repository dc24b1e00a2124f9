"""`lmcache-async serve --json`: one line when it is ready."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.support.daemons import socket_path


def test_the_ready_line_is_json():
    with socket_path() as path:
        command = [sys.executable, "-m", "lmcache_async.cli", "serve", "--socket", str(path), "--json"]
        with subprocess.Popen(
            [*command, "--max-bytes", "16MiB"], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                ready = json.loads(process.stdout.readline())
                process.send_signal(signal.SIGTERM)
                rest, _ = process.communicate(timeout=250)
            finally:
                process.kill()

    assert ready == {"socket": str(path), "max_bytes": 16 << 20, "status": None}
    assert (process.returncode, rest) == (0, "")


def test_a_wrong_option_ends_with_2(invoke):
    result = invoke("serve", "--max-bytes", "much")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "--max-bytes: max_bytes is 'much': expected a size in bytes, such as 8GiB, 500MB or 1048576\n"
    )


def test_a_missing_size_is_refused_with_the_name_of_the_option(invoke, tmp_path):
    file = tmp_path / "host.yaml"
    file.write_text("max_clientz: 3\n")
    told = "max_bytes is missing: pass --max-bytes to serve, such as --max-bytes 20GiB, or set it in the config file\n"

    result = invoke("serve")
    with_file = invoke("serve", "--config", file)

    assert (result.exit_code, result.stdout, result.stderr) == (2, "", told)
    assert (with_file.exit_code, with_file.stdout) == (2, "")
    assert with_file.stderr == (
        f"{file}: {told}{file}, line 1: there is no key max_clientz; did you mean max_clients?\n"
    )
