"""Programs drawn at random as source text, run eagerly and in torchlazy's ways, and compared after each call.

`python -m tests.fuzz --seeds 0:1000 --ways device,mode,compile,module --shrink --write --jobs 2`
"""
