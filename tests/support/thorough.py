"""How long state machines run: HYPOTHESIS_PROFILE=thorough is for a night."""

from __future__ import annotations

import hypothesis


def machine_settings(max_examples: int, steps: int = 25) -> hypothesis.settings:
    """So many runs of so many steps; a hundred times as many runs, and longer ones, in the profile `thorough`."""
    if hypothesis.settings.get_current_profile_name() == "thorough":
        max_examples, steps = 100 * max_examples, 2 * steps
    return hypothesis.settings(max_examples=max_examples, stateful_step_count=steps, deadline=None)
