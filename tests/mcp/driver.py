"""Makes the calls of calls.json with any client, and prints what it got, a line of JSON each.

The first line says what the client saw of the server; cargo xtask test judges them all."""

import json
import pathlib


async def drive(hello, call):
    """`hello` is printed first; `call(tool, arguments)` gives (structured content, text, is_error)."""
    print(json.dumps(hello), flush=True)
    sandbox = ""
    for step in json.loads(pathlib.Path(__file__).with_name("calls.json").read_text()):
        arguments = {
            name: sandbox if value == "$sandbox_id" else value
            for name, value in step["arguments"].items()
        }
        structured, text, is_error = await call(step["tool"], arguments)
        sandbox = json.loads(text).get("sandbox_id") or sandbox
        print(json.dumps({"structured": structured, "text": text, "is_error": bool(is_error)}), flush=True)
