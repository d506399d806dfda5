"""Gives an agent a prompt and prints the answer while it is written. Needs `httpx` and nothing else of ours.

BASE_URL=http://127.0.0.1:8000 API_KEY=arm_… python examples/stream_a_prompt.py "What is 12 * 34?"
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx


def main(prompt: str) -> None:
    with httpx.Client(
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000"),
        headers={"Authorization": f"Bearer {os.environ['API_KEY']}"},
        timeout=httpx.Timeout(10, read=30),  # there is a heartbeat each 15 seconds
    ) as client:
        agent = {
            "name": "calculator",
            "model": "rehearsal:demo",
            "tools": [{"type": "builtin", "name": "calculate"}],
        }
        created = client.post("/v1/agents", json=agent).raise_for_status().json()
        for event in stream(client, f"/v1/agents/{created['id']}/prompt", {"prompt": prompt, "stream": True}):
            show(event)


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a run until it is our turn."""
    with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def show(event: dict[str, Any]) -> None:
    match event:
        case {"type": "event_delta", "delta": {"type": "content_delta", "content": {"text": text}}}:
            print(text, end="", flush=True)
        case {"type": "agent.message"}:
            print()
        case {"type": "agent.tool_use", "name": name, "input": arguments}:
            print(f"[{name} {json.dumps(arguments)}]")
        case {"type": "session.status_idle", "stop_reason": {"type": reason}}:
            print(f"({reason})")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "What is 12 * 34?")
