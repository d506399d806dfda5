"""Calls that need our approval: the run waits without a worker until we allow one and deny the other.

BASE_URL=http://127.0.0.1:8000 API_KEY=arm_… python examples/approve_a_call.py
"""

import os
from typing import Any

import httpx

TOOL = {"type": "builtin", "name": "calculate", "requires_approval": True}
# A script for the rehearsal model (docs/rehearsal.md). A real model would be asked in prose.
PROMPT = """\
call: calculate {"expression": "6 * 7"}
call: calculate {"expression": "10 ** 100"}
---
say: The tools say:
echo
"""


def main() -> None:
    with httpx.Client(
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000"),
        headers={"Authorization": f"Bearer {os.environ['API_KEY']}"},
        timeout=90,
    ) as client:
        agent = post(client, "/v1/agents", {"name": "careful", "model": "rehearsal:demo", "tools": [TOOL]})
        run = post(client, f"/v1/agents/{agent['id']}/prompt", {"prompt": PROMPT})
        session_id, run_id = run["session_id"], run["run_id"]
        while run["stop_reason"] and run["stop_reason"]["type"] == "requires_action":
            waiting = run["stop_reason"]["event_ids"]
            calls = listed(client, f"/v1/sessions/{session_id}/events?types=agent.tool_use")
            answers = [decide(call) for call in calls if call["id"] in waiting]
            post(client, f"/v1/sessions/{session_id}/events", {"events": answers})
            run = client.get(f"/v1/runs/{run_id}/wait").raise_for_status().json()
        for message in listed(client, f"/v1/sessions/{session_id}/events?types=agent.message"):
            print("".join(block["text"] for block in message["content"]))


def decide(call: dict[str, Any]) -> dict[str, Any]:
    """The event that allows or denies this call."""
    answer = {"type": "user.tool_confirmation", "tool_use_id": call["id"]}
    if "**" in call["input"]["expression"]:
        return answer | {"result": "deny", "deny_message": "No powers, please."}
    return answer | {"result": "allow"}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return answered


def listed(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(path).raise_for_status().json()["data"]
    return found


if __name__ == "__main__":
    main()
