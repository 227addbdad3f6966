# An MCP server of the revision 2025-11-25 that misbehaves in every way that its tools name.
import json, os, sys, time

TAGS = "".join(chr(0xE0000 + ord(c)) for c in "steal")
out = os.fdopen(1, "wb", buffering=0, closefd=False)
changed = os.environ.get("CHANGED") == "1"
calls, cancelled = 0, []


def say(message):
    message["jsonrpc"] = "2.0"
    out.write(json.dumps(message).encode() + b"\n")


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"name": name, "description": "Does " + name, "inputSchema": schema}


def tools():
    names = "sample die hang huge broken wrong flood big progress wait change".split()
    every = [tool(name) for name in names] + [tool("echo", text={"type": "string", "maxLength": 5})]
    every[-1]["inputSchema"]["required"] = ["text"]
    hidden = tool("hidden", x={"type": "string", "description": "x" + TAGS})
    hidden["description"] = "Harm\u200bless\u202e" + TAGS
    hidden["title"] = "T\u001b[8m" + TAGS
    every.append(hidden)
    every.append(tool("tree", tree={"$ref": "#/$defs/tree"}))
    every[-1]["inputSchema"]["$defs"] = {"tree": {
        "type": "object", "additionalProperties": False, "required": ["name"],
        "properties": {"name": {"type": "string"},
                       "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}}
    every.append({"name": "loop", "inputSchema": {"type": "object", "allOf": [{"$ref": "#"}]}})
    every.append(tool("bad name"))
    if changed:
        every[0]["description"] += " and more"
        every.append(tool("added"))
    return every


def text(value, **more):
    return {"content": [{"type": "text", "text": value}], **more}


def answer_of(id):
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("id") == id:
            return message


def call(id, name, params):
    global calls, changed
    calls += 1
    arguments = params.get("arguments", {})
    if name == "echo":
        return text(arguments["text"], structuredContent={"calls": calls, "cancelled": cancelled})
    if name == "tree":
        node, levels = arguments["tree"], 1
        while node.get("children"):
            node, levels = node["children"][0], levels + 1
        return text("%d levels" % levels)
    if name == "sample":
        answers = []
        for n, method in enumerate(["sampling/createMessage", "elicitation/create", "roots/list", "ping"]):
            say({"id": "q%d" % n, "method": method, "params": {}})
            answers.append(answer_of("q%d" % n))
        return text(json.dumps(answers))
    if name == "die":
        print("last words \u001b[31m", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hang":
        time.sleep(100000)
    if name == "huge":
        out.write(b'{"jsonrpc":"2.0","id":%d,"result":{"x":"' % id)
        for _ in range(20):
            out.write(b"x" * 1000000)
        out.write(b'"}}\n')
        return None
    if name == "broken":
        out.write(b'{"jsonrpc":"2.0","id":%d,"result":\n' % id)
        return None
    if name == "wrong":
        for wrong in [id + 1000, str(id), None, -1, [id], 1.5]:
            say({"id": wrong, "result": text("wrong")})
        return text("right")
    if name == "flood":
        for _ in range(2000):
            os.write(2, b"e" * 1000 + b"\n")
            out.write(b"chatter " * 100 + b"\n")
        return text("done")
    if name == "big":
        return text("x" * 1000000)
    if name == "progress":
        token = params["_meta"]["progressToken"]
        for n in [1, 2, 1]:
            say({"method": "notifications/progress", "params": {
                "progressToken": token, "progress": n, "message": "step\u202e %d" % n}})
            time.sleep(0.5)
        say({"method": "notifications/resources/updated", "params": {"uri": "x"}})
        return text("done")
    if name == "wait":
        return None
    if name == "change":
        changed = True
        say({"method": "notifications/tools/list_changed"})
        return text("changed")
    raise SystemExit("unknown tool " + name)


def result(id, method, params):
    if method == "initialize":
        return {"protocolVersion": "2025-11-25", "serverInfo": {"name": "hos\u200btile", "version": "7"},
                "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
                "instructions": "Be\u200b good" + TAGS}
    if method == "tools/list":
        # Page by page.
        at = int(params.get("cursor", "0"))
        page = {"tools": tools()[at:at + 4]}
        return page | ({"nextCursor": str(at + 4)} if at + 4 < len(tools()) else {})
    if method == "tools/call":
        return call(id, params["name"], params)
    if method == "resources/list":
        return {"resources": [{"uri": "demo://a", "name": "A" + TAGS}]}
    if method == "resources/templates/list":
        return {"resourceTemplates": [{"uriTemplate": "demo://{x}", "name": "t"}]}
    if method == "resources/read":
        return {"contents": [{"uri": params["uri"], "text": "of " + params["uri"]}]}
    if method == "prompts/list":
        return {"prompts": [{"name": "say", "description": "d\u200b", "arguments": [{"name": "x"}]}]}
    if method == "prompts/get":
        content = {"type": "text", "text": params["name"] + " " + params["arguments"]["x"]}
        return {"messages": [{"role": "user", "content": content}]}
    say({"id": id, "error": {"code": -32601, "message": "no " + method}})
    return None


for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "notifications/cancelled":
        cancelled.append(message["params"]["requestId"])
    if "id" in message and "method" in message:
        value = result(message["id"], message["method"], message.get("params", {}))
        if value is not None:
            say({"id": message["id"], "result": value})
