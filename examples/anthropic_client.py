"""The official `anthropic` client, pointed at Armillary: an agent, a session, two prompts, one conversation.

BASE_URL=http://127.0.0.1:8000 API_KEY=arm_… python examples/anthropic_client.py
"""

import os

from anthropic import Anthropic


def main() -> None:
    with Anthropic(
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000"), api_key=os.environ["API_KEY"]
    ) as client:
        agent = client.beta.agents.create(name="guide", model="rehearsal:demo", system="You are a guide.")
        # The client demands an environment; any text will do, it is not used.
        session = client.beta.sessions.create(agent=agent.id, environment_id="none", title="Two prompts")
        for prompt in ("Say hello.", "And goodbye."):
            print(f"> {prompt}")
            ask(client, session.id, prompt)
        used = client.beta.sessions.retrieve(session.id).usage
        print(f"{used.input_tokens} tokens in, {used.output_tokens} out")


def ask(client: Anthropic, session_id: str, prompt: str) -> None:
    """Prints the answer while it is written. The stream is open before the prompt is sent, so it has all."""
    with client.beta.sessions.events.stream(session_id, event_deltas=["agent.message"]) as events:
        client.beta.sessions.events.send(
            session_id,
            events=[{"type": "user.message", "content": [{"type": "text", "text": prompt}]}],
        )
        for event in events:
            if event.type == "event_delta" and event.delta.type == "content_delta":
                print(event.delta.content.text, end="", flush=True)
            elif event.type == "session.status_idle":
                print(f"\n({event.stop_reason.type})")
                return


if __name__ == "__main__":
    main()
