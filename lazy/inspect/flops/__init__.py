"""`torchlazy.flops`: operations and bytes of a call, counted without running it, as functions of its sizes."""
