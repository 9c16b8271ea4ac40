"""The page of runs that are being trained: who is answered, and what the page says of the time left."""

import http.client
import json
import socket
import struct
import threading

import pytest
from synthetic_runs import write_run

from mnemos import InputError
from mnemos.lab.report import watch
from mnemos.lab.report.watch import Watch


@pytest.fixture
def served(tmp_path):
    """A server of a comparison that is not finished, its run, which has done 1,000 of 4,000 updates, and the path."""
    lines = [{"kind": "train", "step": step, "loss": 1.0, "seconds": 0.021 * step} for step in (500, 1000)]
    run = write_run(tmp_path / "cmp" / "demo" / "seed-0", "demo", steps=4000, metrics=lines, finished=False)
    with Watch([tmp_path / "cmp"]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server, run, server.address.split(str(server.server_port))[1]
        server.shutdown()


def get(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_and_its_state_follow_the_run(served):
    server, run, path = served
    status, page = get(server, path)
    assert status == 200
    assert 'id="watch"' in page
    assert "connect-src 'self'" in page
    status, state = get(server, f"{path}state")
    before = json.loads(state)
    assert before["text"] == "demo, seed 0: update 1,000 of 4,000, 0:01:03 of training left"  # 21 ms an update
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2000, "loss": 1.0, "seconds": 42.0}\n{"kind": "tra')
    assert get(server, path)[0] == 200, "a line that is being written"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('in", "step": 3000, "loss": 0.5, "seconds": 63.0}\n')
    after = json.loads(get(server, f"{path}state")[1])
    assert after["version"] != before["version"]
    assert "update 3,000 of 4,000, 0:00:21" in after["text"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4000, "loss": 0.5, "seconds": 84.0}\n')
    after = json.loads(get(server, f"{path}state")[1])
    assert after["text"] == "demo, seed 0: all 4,000 updates are done, the test is not"


def test_only_the_page_is_assembled_and_says_its_version(served, monkeypatch):
    server, run, path = served
    made = []
    monkeypatch.setattr(watch, "assemble", lambda found, status: made.append(found) or f"{status}\udcff")
    state = json.loads(get(server, f"{path}state")[1])
    (run / "result.json.tmp").write_text("{")
    (run / "gone.json").symlink_to(run / "nothing")  # as a file that vanished since it was listed
    assert json.loads(get(server, f"{path}state")[1]) == state
    assert not made
    for _ in range(2):
        assert f'data-version="{state["version"]}"' in get(server, path)[1]
    assert len(made) == 1
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 1200, "loss": 1.0}\n')
    assert json.loads(get(server, f"{path}state")[1])["text"] == "demo, seed 0: update 1,200 of 4,000"
    (run / "metrics.jsonl").write_text("")
    assert json.loads(get(server, f"{path}state")[1])["text"] == "demo, seed 0: no update recorded yet"


def test_other_hosts_origins_and_tokens_are_refused(served):
    server, _, path = served
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/")[0] == 404
    assert get(server, path[:-2] + "x/")[0] == get(server, path[1:-3])[0] == 404
    assert get(server, path, Host="example.com")[0] == 403
    assert get(server, path, Host=f"example.com:{server.server_port}")[0] == 403
    assert get(server, path, Origin="http://example.com")[0] == 403
    assert get(server, path, Sec_Fetch_Site="cross-site")[0] == 403
    assert get(server, path, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200
    assert get(server, f"{path}?from=a-friend")[0] == 200


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"recipe\.json"):
        Watch([tmp_path])


def test_a_browser_that_goes_away_is_no_error(served, capsys, monkeypatch):
    server, _, path = served
    monkeypatch.setattr(watch, "assemble", lambda found, status: "x" * 10_000_000)
    ended = threading.Semaphore(0)
    shutdown = server.shutdown_request
    monkeypatch.setattr(server, "shutdown_request", lambda request: (shutdown(request), ended.release()))
    with socket.create_connection(("127.0.0.1", server.server_port)) as browser:
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        browser.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        browser.recv(100)
    assert ended.acquire(timeout=10)
    monkeypatch.setattr(server, "answer", lambda path: 1 / 0)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, path)
    assert ended.acquire(timeout=10)
    assert capsys.readouterr().err == "mnemos: the page could not be made (ZeroDivisionError: division by zero)\n"
