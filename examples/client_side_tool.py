"""A tool that this program runs: the agent asks, the run waits without a worker, we answer, it goes on.

BASE_URL=http://127.0.0.1:8000 API_KEY=arm_… python examples/client_side_tool.py
"""

import os
import platform
from typing import Any

import httpx

TOOL = {
    "type": "custom",
    "name": "machine",
    "description": "Tells something about the user's machine: `system`, `python` or `machine`.",
    "input_schema": {
        "type": "object",
        "properties": {"what": {"enum": ["system", "python", "machine"]}},
        "required": ["what"],
    },
}
# A script for the rehearsal model (docs/rehearsal.md). A real model would be asked in prose.
PROMPT = """\
call: machine {"what": "system"}
call: machine {"what": "python"}
---
say: Your machine says:
echo
"""


def main() -> None:
    with httpx.Client(
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000"),
        headers={"Authorization": f"Bearer {os.environ['API_KEY']}"},
        timeout=90,
    ) as client:
        agent = post(client, "/v1/agents", {"name": "asker", "model": "rehearsal:demo", "tools": [TOOL]})
        answer = post(client, f"/v1/agents/{agent['id']}/prompt", {"prompt": PROMPT})
        session_id, run_id = answer["session_id"], answer["run_id"]
        run = answer
        while run["stop_reason"] and run["stop_reason"]["type"] == "requires_action":
            results = [run_tool(client, session_id, event_id) for event_id in run["stop_reason"]["event_ids"]]
            post(client, f"/v1/sessions/{session_id}/events", {"events": results})
            run = client.get(f"/v1/runs/{run_id}/wait").raise_for_status().json()
        for message in listed(client, f"/v1/sessions/{session_id}/events?types=agent.message"):
            print("".join(block["text"] for block in message["content"]))


def run_tool(client: httpx.Client, session_id: str, event_id: str) -> dict[str, Any]:
    """Runs the call that this event asks for; the event that answers it."""
    calls = listed(client, f"/v1/sessions/{session_id}/events?types=agent.custom_tool_use")
    [call] = [call for call in calls if call["id"] == event_id]
    known = {
        "system": platform.system,
        "python": platform.python_version,
        "machine": platform.machine,
    }
    text = known[call["input"]["what"]]()
    return {
        "type": "user.custom_tool_result",
        "custom_tool_use_id": event_id,
        "content": [{"type": "text", "text": text}],
    }


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answered


def listed(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(path).raise_for_status().json()["data"]
    return found


if __name__ == "__main__":
    main()
