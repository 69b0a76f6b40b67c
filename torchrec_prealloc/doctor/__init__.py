"""What a batch is made of, how the engine moves it, and what of it, and of the environment, costs time.

`torchrec_prealloc.explain(batch)` gives an `explain.Explanation`; its parts are described in `explained`, its ways in
`reasons.Route`, its advice in `advice.Cost`. `environment.environment()` gives an `Environment`. The command
`torchrec-prealloc doctor` prints both.
"""
