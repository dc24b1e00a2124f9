"""Number of examples of state machines. HYPOTHESIS_PROFILE=thorough runs for a night."""

from __future__ import annotations

import hypothesis


def machine_settings(max_examples: int, steps: int = 25) -> hypothesis.settings:
    """Return settings; the profile `thorough` has 100 times as many examples and twice as many steps."""
    if hypothesis.settings.get_current_profile_name() == "thorough":
        max_examples, steps = 100 * max_examples, 2 * steps
    return hypothesis.settings(max_examples=max_examples, stateful_step_count=steps, deadline=None)
