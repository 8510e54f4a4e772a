"""Settings of verl, TRL and OpenRLHF as ours."""
