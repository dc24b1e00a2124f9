"""`lmcache-async serve --json`: one line that says that it is ready, for whoever started it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.daemon.daemons import socket_path


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
                rest, _ = process.communicate(timeout=60)
            finally:
                process.kill()

    assert ready == {"socket": str(path), "max_bytes": 16 << 20, "peers": None, "status": None}
    assert (process.returncode, rest) == (0, "")


def test_a_wrong_option_ends_with_2(invoke):
    result = invoke("serve", "--max-bytes", "much")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "--max-bytes: max_bytes is 'much': expected a size in bytes, such as 8GiB, 500MB or 1048576\n"
    )
