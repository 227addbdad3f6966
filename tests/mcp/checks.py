"""What every client must see. `call(name, arguments)` gives (structured content, text, is_error)."""

import json

TOOLS = [
    "run_command",
    "execute_code",
    "read_file",
    "write_file",
    "list_files",
    "start_process",
    "poll_process",
    "stop_process",
    "create_sandbox",
    "destroy_sandbox",
]


async def check(tools, call):
    assert [tool.name for tool in tools] == TOOLS, tools
    for tool in tools:
        assert tool.description and tool.annotations is not None, tool

    async def good(name, arguments):
        structured, text, is_error = await call(name, arguments)
        assert not is_error, (name, text)
        assert json.loads(text) == structured, "both forms hold the same"
        return structured

    async def bad(name, arguments, kind):
        structured, text, is_error = await call(name, arguments)
        assert is_error, (name, text)
        assert json.loads(text)["class"] == kind, text

    result = await good("execute_code", {"language": "python", "code": "print(6*7)"})
    assert result["stdout"] == "42\n" and result["exit_code"] == 0, result
    assert result["sandbox"] == "discarded" and result["host"] in ("native", "emulated")

    result = await good("run_command", {"command": "echo out; echo err >&2; exit 3"})
    assert (result["stdout"], result["stderr"], result["exit_code"]) == ("out\n", "err\n", 3)

    result = await good("run_command", {"command": "sleep 60", "timeout_seconds": 1})
    assert result["timed_out"] and result["exit_code"] is None

    result = await good("run_command", {"command": "head -c 1000000 /dev/zero | tr '\\0' x"})
    assert result["truncated"] and result["stdout_bytes"] == 1_000_000
    assert len(json.dumps(result)) <= 24 * 1024

    sandbox = (await good("create_sandbox", {}))["sandbox_id"]
    await good("write_file", {"sandbox_id": sandbox, "path": "a/b.txt", "content": "héllo\n"})
    result = await good("read_file", {"sandbox_id": sandbox, "path": "a/b.txt"})
    assert result["content"] == "héllo\n" and result["size"] == 7, result
    result = await good("list_files", {"sandbox_id": sandbox, "recursive": True})
    assert [entry["path"] for entry in result["entries"]] == ["a", "a/b.txt"], result
    result = await good("run_command", {"sandbox_id": sandbox, "command": "cat a/b.txt"})
    assert result["stdout"] == "héllo\n" and result["sandbox_id"] == sandbox, result
    await good("destroy_sandbox", {"sandbox_id": sandbox})

    await bad("read_file", {"sandbox_id": sandbox, "path": "a/b.txt"}, "sandbox_not_found")
    await bad("destroy_sandbox", {"sandbox_id": "sb_00000000000000000000000000000000"}, "sandbox_not_found")
    await bad("run_command", {"command": "true", "timeout_seconds": 601}, "invalid_argument")
    await bad("run_command", {"command": "true", "unknown": 1}, "invalid_argument")
    await bad("execute_code", {"language": "cobol", "code": "x"}, "invalid_argument")
    print("ok")
