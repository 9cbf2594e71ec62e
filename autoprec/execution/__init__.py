"""Running captured graphs: who runs (dispatch), the guard around a step, replay, and measuring."""
