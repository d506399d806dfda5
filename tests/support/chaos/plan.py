"""What a round does, all of it drawn from one seed."""

import random

from msgspec import Struct

from tests.support.chaos.acts import Act, random_acts
from tests.support.chaos.faults import Fault, random_point_fault, random_timed_fault

SESSIONS = (4, 7)  # at least and at most, in one round


class Plan(Struct, frozen=True, kw_only=True):
    """`sessions`: what clients do in each of them, in order. `faults`: what goes wrong meanwhile."""

    seed: int
    sessions: tuple[tuple[Act, ...], ...]
    faults: tuple[Fault, ...]

    def lines(self) -> list[str]:
        """To be read by people."""
        acts = [f"session {at}: {act}" for at, acts in enumerate(self.sessions) for act in acts]
        return [f"seed {self.seed}", *(f"fault: {fault}" for fault in self.faults), *acts]


def random_plan(seed: int) -> Plan:
    """The same plan for the same seed, in every process."""
    rng = random.Random(seed)
    faults: list[Fault] = [random_point_fault(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
    faults += [random_timed_fault(rng) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return Plan(
        seed=seed,
        sessions=tuple(random_acts(rng, f"{seed}.{at}") for at in range(rng.randint(*SESSIONS))),
        faults=tuple(faults),
    )
