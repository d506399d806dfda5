"""`python -m app.embedded DATA`: holds the servers of a folder until SIGTERM.

The test suite runs it: several test processes share one pair, and none of them is its parent. For anything
else there is `armillary serve`.
"""

import argparse
import os
import sys
from pathlib import Path

from app.embedded.errors import EmbeddedError
from app.embedded.supervisor import Supervisor
from app.signals import STOPPING, SignalInbox

CHECK_S = 1.0  # how soon the end of another process is noticed where the kernel cannot tell us


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m app.embedded")
    parser.add_argument("data", type=Path)
    parser.add_argument("--until-exit-of", type=int, metavar="PID", help="stop when that process is gone")
    parser.add_argument("--fast", action="store_true", help="give up safety from power loss")
    arguments = parser.parse_args()
    try:
        with SignalInbox() as inbox, Supervisor(arguments.data, is_durable=not arguments.fast) as supervisor:
            while arguments.until_exit_of is None or _is_alive(arguments.until_exit_of):
                if inbox.wait(CHECK_S) & STOPPING:
                    break
                supervisor.revive()
    except EmbeddedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    sys.exit(main())
