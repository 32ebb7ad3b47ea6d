#!/usr/bin/env bash
# In which order does LiteLLM 1.110.2 hand an assistant's turn of Anthropic's Messages API to /v1/responses?
#
# Claude Code sends thinking, text, and then a call (`tool_use`). Expected: items in that order. Seen: the text comes after
# the call, and so between the call and its output (reasoning, function_call, message, function_call_output). Whoever turns
# items into messages one by one gets a text between a call and its result, which chat templates refuse or misread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet litellm==1.110.2 fastapi
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/env/bin/python" - <<'PYTHON'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

import litellm

bodies = []


class Recorder(BaseHTTPRequestHandler):
    """Notes a body, and refuses it."""

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "noted"}}')

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Recorder)
threading.Thread(target=server.serve_forever, daemon=True).start()
turn = [
    {"type": "thinking", "thinking": "Hm", "signature": "s"},
    {"type": "text", "text": "Reading."},
    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
]
result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "red"}
messages = [
    {"role": "user", "content": "Read a."},
    {"role": "assistant", "content": turn},
    {"role": "user", "content": [result]},
]
request = litellm.anthropic.messages.acreate(
    model="openai/m",
    api_base=f"http://127.0.0.1:{server.server_port}/v1",
    api_key="none",
    max_tokens=9,
    messages=messages,
)
try:
    asyncio.run(request)
except litellm.BadRequestError:
    pass
print("litellm", version("litellm"))
order = [item["type"] for item in bodies[0]["input"][1:]]
print([part["type"] for part in turn], "become", order)
assert order == ["reasoning", "function_call", "message", "function_call_output"], "the order has changed"
PYTHON
