"""Certificates of tests are valid by the rules of Python 3.13."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import Authority

pytestmark = pytest.mark.one_loop


async def test_certificates_pass_the_strict_verification_that_python_3_13_enables(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    client = ssl.create_default_context(cafile=authority.file)
    client.verify_flags |= ssl.VERIFY_X509_STRICT

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=authority.server_context())
    async with server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=client)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
