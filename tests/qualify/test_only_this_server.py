# SPDX-License-Identifier: Apache-2.0
"""Only the given address is contacted, and nothing about it or its user is written down."""

from __future__ import annotations

import asyncio
import getpass
import http.server
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from b12x_overlay.qualify.address import Address, OnlyThisServer
from b12x_overlay.qualify.faults import Fault
from qualify.fake_server import serving


@pytest.fixture
def connections(monkeypatch):
    """Every address that a socket is connected to or a name that is looked up."""
    seen = []
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def spy(self, address):
        seen.append(address)
        return connect(self, address)

    def look(host, *arguments, **options):
        seen.append((host, arguments[0] if arguments else options.get("port")))
        return lookup(host, *arguments, **options)

    monkeypatch.setattr(socket.socket, "connect", spy)
    monkeypatch.setattr(socket, "getaddrinfo", look)
    return seen


def test_proxies_and_redirects_are_not_followed(qualify, connections, monkeypatch):
    with serving() as trap:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, trap.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with serving(fault="redirect", where="completions") as server:
            qualify("run", server.url, "--needle-requests", "3")
            inside = {("127.0.0.1", server.port)}
        assert trap.seen.paths == []
    assert {tuple(address[:2]) for address in connections} <= inside


def test_the_key_is_sent_and_never_written(qualify, monkeypatch):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    with serving(key=key, model=f"/home/{getpass.getuser()}/models/tiny") as server:
        done = qualify("run", server.url, "--api-key-env", "MY_KEY", "--needle-requests", "4")
        assert set(server.seen.authorizations) == {f"Bearer {key}"}
    assert done.result["status"] == "complete"
    assert done.result["arms"][0]["identity"]["model"] == "tiny"
    written = [path for path in done.folder.rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"result.json", "report.md", "report.html"}
    for path in written:
        text = path.read_text()
        for secret in (
            key,
            str(server.port),
            "127.0.0.1",
            "/home/",
            socket.gethostname(),
            str(Path.cwd()),
        ):
            assert secret not in text, (path, secret)


def test_hosts_in_error_messages_are_not_written(qualify):
    with serving(fault="http_500") as server:
        done = qualify("run", server.url, "--only", "prefill")
    text = (done.folder / "result.json").read_text()
    assert "refused at <url>" in text
    assert not re.search(r"10\.1\.2\.3", text)


def test_a_key_that_the_server_repeats_is_not_written(qualify, monkeypatch):
    monkeypatch.setenv("MY_KEY", "correcthorsebattery")
    with serving(key="correcthorsebattery", fault="http_500") as server:
        done = qualify("run", server.url, "--only", "prefill", "--api-key-env", "MY_KEY")
    for path in done.folder.iterdir():
        assert "correcthorse" not in path.read_text()
    assert "for <key>" in (done.folder / "result.json").read_text()


@pytest.mark.parametrize("key", ["2048", "true", "complete", "decode", "pass"])
def test_a_key_that_is_also_a_value_leaves_the_result_readable(qualify, monkeypatch, key):
    monkeypatch.setenv("MY_KEY", key)
    with serving(key=key) as server:
        done = qualify(
            "run",
            server.url,
            "--only",
            "prefill",
            "--prefill-lengths",
            "2048",
            "--api-key-env",
            "MY_KEY",
        )
    assert done.code == 0, done.err
    assert done.result["plan"]["prefill"]["lengths"] == [2048]
    assert qualify("report", str(done.folder)).code == 0


def test_the_transport_refuses_every_other_origin():
    transport = OnlyThisServer(Address.parse("http://127.0.0.1:1"), verify=True, connections=1)
    for url in ("http://127.0.0.1:2/", "https://127.0.0.1:1/", "http://localhost:1/"):
        with pytest.raises(Fault, match="another address"):
            asyncio.run(transport.handle_async_request(httpx.Request("GET", url)))


def test_a_missing_key_variable_is_named(qualify, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with serving() as server:
        done = qualify("run", server.url, "--api-key-env", "MY_KEY")
        assert server.seen.paths == []
    assert done.code == 2
    assert "MY_KEY is not set" in done.err


def test_no_more_requests_in_flight_than_asked(qualify):
    with serving() as server:
        qualify("run", server.url, "--only", "decode", "--decode-concurrency", "3")
    assert server.seen.most_running <= 3


def test_json_goes_to_standard_output_and_text_to_standard_error(qualify):
    with serving() as server:
        done = qualify("run", server.url, "--only", "prefill", "--json")
    assert json.loads(done.out) == done.result
    assert "verdict" in done.err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here to make a certificate")
def test_a_certificate_that_is_not_trusted_leads_to_ca_file(qualify, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj",
         "/CN=localhost", "-days", "2", "-keyout", key, "-out", certificate], check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        done = qualify("run", f"https://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.code == 4
    assert "self-signed certificate" in done.err
    assert "--ca-file FILE" in done.err
