"""The embedded S3, with the real MiniStack."""

from __future__ import annotations

import http.client
import http.server
import importlib.util
import os
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from diloco import embedded
from diloco.embedded import EmbeddedS3, environment
from diloco.errors import ConfigurationError, StoreUnreachableError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ministack") is None, reason="needs the extra `local`")


def request(s3: EmbeddedS3, method: str, key: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(s3.endpoint_url.removeprefix("http://"), timeout=10)
    with closing(connection):
        connection.request(method, f"/diloco/{key}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def put_if_absent(s3: EmbeddedS3, key: str, body: bytes) -> int:
    return request(s3, "PUT", key, body, **{"If-None-Match": "*"})[0]


def server_pid(s3: EmbeddedS3) -> int:
    assert s3._server is not None
    children = Path(f"/proc/{s3._server.pid}/task/{s3._server.pid}/children").read_text()
    return int(children.split()[0])


def answers(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_objects_survive_a_stop(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path / "s3") as s3:
        first = s3.endpoint_url
        assert put_if_absent(s3, "run/spec.json", b"one") == 200
        assert put_if_absent(s3, "run/spec.json", b"two") == 412
    assert not answers(first)
    with EmbeddedS3(tmp_path / "s3") as s3:
        assert put_if_absent(s3, "run/spec.json", b"two") == 412
        assert request(s3, "GET", "run/spec.json") == (200, b"one")
        assert put_if_absent(s3, "run/run.json", b"three") == 200


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the server in /proc")
def test_objects_survive_a_kill(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path / "s3") as s3:
        assert put_if_absent(s3, "run/spec.json", b"one") == 200
        os.kill(server_pid(s3), signal.SIGKILL)
        assert s3._server is not None
        s3._server.wait(20)
    with EmbeddedS3(tmp_path / "s3") as s3:
        assert put_if_absent(s3, "run/spec.json", b"two") == 412


def test_it_listens_on_the_loopback_only_and_logs_to_a_file(tmp_path: Path) -> None:
    with EmbeddedS3(tmp_path / "s3", log=tmp_path / "logs" / "s3.log") as s3:
        assert s3.endpoint_url.startswith("http://127.0.0.1:")
        assert (tmp_path / "logs" / "s3.log").exists()
        assert s3.uri == "s3://diloco"
        assert s3.storage_options["endpoint_url"] == s3.endpoint_url == s3.env["AWS_ENDPOINT_URL"]


def test_a_taken_port_is_left_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    stranger = http.server.HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=stranger.serve_forever)
    thread.start()
    try:
        real = embedded._free_port
        ports = [stranger.server_port]
        monkeypatch.setattr(embedded, "_free_port", lambda: ports.pop() if ports else real())
        with EmbeddedS3(tmp_path / "s3") as s3:
            assert s3.endpoint_url != f"http://127.0.0.1:{stranger.server_port}"
            assert put_if_absent(s3, "x", b"") == 200
    finally:
        stranger.shutdown()
        thread.join()
        stranger.server_close()


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"needs ministack: pip install 'diloco-aws\[local\]'"):
        EmbeddedS3(tmp_path / "s3").start()
    assert not list(tmp_path.iterdir())


def test_a_failed_start_shows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken" / "ministack").mkdir(parents=True)
    (tmp_path / "broken" / "ministack" / "__init__.py").touch()
    (tmp_path / "broken" / "ministack" / "__main__.py").write_text("raise SystemExit('no luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    s3 = EmbeddedS3(tmp_path / "s3")
    with pytest.raises(StoreUnreachableError, match="ended while it started: no luck"):
        s3.start()
    assert s3._server is None


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "mine")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with environment({"AWS_PROFILE": None, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}):
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
    assert os.environ["AWS_PROFILE"] == "mine"
    assert "AWS_ENDPOINT_URL" not in os.environ
