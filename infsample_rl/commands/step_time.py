"""What a decoding step takes where nothing else is said: SmolLM2-135M, float32, on 2 cores (docs/engine.md). Standard
library only."""

STEP_SECONDS = 0.0170  # c0, of a running step
ROW_SECONDS = 0.00182  # c1, of a row in a step, and of a token computed again
PARK_SECONDS = 0.000012  # c2, of a token whose KV is parked and brought back
