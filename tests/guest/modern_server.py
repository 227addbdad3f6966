# An MCP server of the revision 2026-07-28 that knows nothing older: no handshake, and a request that does
# not say what it is is refused.
import json, sys

KEY = "io.modelcontextprotocol/"
TOOLS = [
    {"name": "add", "description": "Adds", "inputSchema": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"]}},
    {"name": "ask", "description": "Asks back", "inputSchema": {"type": "object"}},
]


def result(method, params):
    if method == "server/discover":
        return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}},
                "instructions": "Only new", "ttlMs": 0, "cacheScope": "public",
                "_meta": {KEY + "serverInfo": {"name": "modern", "version": "9"}}}
    if method == "tools/list":
        return {"tools": TOOLS, "ttlMs": 0, "cacheScope": "public"}
    if method == "tools/call" and params["name"] == "add":
        return {"content": [{"type": "text", "text": str(params["arguments"]["a"] + params["arguments"]["b"])}]}
    if method == "tools/call":
        question = {"method": "elicitation/create", "params": {"message": "Your password?"}}
        return {"resultType": "input_required", "inputRequests": {"q": question}, "requestState": "s"}
    raise LookupError(method)


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    params = message.get("params", {})
    meta = params.get("_meta", {})
    try:
        if meta.get(KEY + "protocolVersion") != "2026-07-28" or KEY + "clientCapabilities" not in meta:
            raise LookupError(message["method"])
        answer["result"] = {"resultType": "complete"} | result(message["method"], params)
    except LookupError as error:
        answer["error"] = {"code": -32601, "message": "no " + str(error)}
    print(json.dumps(answer), flush=True)
