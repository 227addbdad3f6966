"""The cases of PyPI agent-injection-bench as tool output: python injection.py CASULO ARGS...

Each is printed, raised, and used as the name and the content of a file in a sandbox. None may change what the
gateway is or does: the tools, the next call, the shape of the result. That the text reaches the client is right; it
is the client's to distrust, and a hidden character in it must be seen."""

import json
import subprocess
import sys

from importlib import resources

HIDDEN = {*range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF, *range(0xE0000, 0xE0080)}


class Client:
    def __init__(self, command):
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.id = 0

    def request(self, method, **params):
        self.id += 1
        params["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        message = {"jsonrpc": "2.0", "id": self.id, "method": method, "params": params}
        self.server.stdin.write(json.dumps(message).encode() + b"\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        assert answer.get("id") == self.id, ("the next line is the answer, and nothing else", answer)
        return answer["result"]

    def call(self, name, **arguments):
        result = self.request("tools/call", name=name, arguments=arguments)
        assert not result.get("isError"), result
        assert set(result) <= {"content", "structuredContent", "isError", "resultType", "_meta"}, set(result)
        kinds = [block["type"] for block in result["content"]]
        # Files of the sandbox are linked to when it ends; their names are the attacks.
        links = kinds[1:] if name == "destroy_sandbox" else []
        assert kinds == ["text", *links] and set(links) <= {"resource_link"}, kinds
        assert not HIDDEN & set(map(ord, json.dumps(result["content"][1:], ensure_ascii=False)))
        assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
        return result["structuredContent"]


def main():
    text = resources.files("aib").joinpath("data/attacks.jsonl").read_text(encoding="utf-8")
    cases = [json.loads(line) for line in text.splitlines() if line.strip()]
    assert len(cases) == 24, len(cases)
    client = Client(sys.argv[1:])
    tools = client.request("tools/list")
    sandbox = client.call("create_sandbox")["sandbox_id"]
    keys = None
    for case in cases:
        attack = case["injected"]
        results = [
            client.call("run_command", sandbox_id=sandbox, command="cat; cat /dev/null >&2", stdin=attack),
            client.call("execute_code", sandbox_id=sandbox, language="python", code=f"raise ValueError({attack!r})"),
            client.call("execute_code", sandbox_id=sandbox, language="python", code=repr(attack)),
        ]
        client.call("write_file", sandbox_id=sandbox, path="attack.txt", content=attack)
        read = client.call("read_file", sandbox_id=sandbox, path="attack.txt")
        name = attack.replace("/", " ").encode()[:200].decode(errors="ignore").replace("\0", " ") or "x"
        client.call("write_file", sandbox_id=sandbox, path=f"names/{name}", content="x")
        listed = client.call("list_files", sandbox_id=sandbox, path="names")
        assert listed["entries"], case["id"]
        shown = json.dumps([*results, read, listed], ensure_ascii=False)
        assert not HIDDEN & set(map(ord, shown)), case["id"]
        for result in results:
            result.pop("result", None)
            result.pop("files", None)
            assert result["sandbox_id"] == sandbox and result["sandbox"] == "kept"
            keys = keys or set(result)
            assert set(result) == keys, (case["id"], set(result) ^ keys)
        assert client.request("tools/list") == tools, case["id"]
    assert client.call("run_command", command="echo fine")["stdout"] == "fine\n"
    ended = client.call("destroy_sandbox", sandbox_id=sandbox)
    assert any(file["path"] == "attack.txt" for file in ended["artifacts"]), ended
    assert not HIDDEN & set(map(ord, json.dumps(ended, ensure_ascii=False)))
    client.server.stdin.close()
    assert client.server.wait(timeout=60) == 0
    print("ok")


main()
