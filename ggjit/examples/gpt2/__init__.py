"""GPT-2 in five programs, each of which leaves more of the memory to the engine than the one before.

                    weights and KV cache                    intermediates
    main_ctx        in a context of a size summed by hand   in a new context for each run, a place for each tensor
    main_alloc      as before                               headers in a context, one planned buffer (GraphAllocator)
    main_backend    one buffer each of a device             as before, in the device's memory
    main_sched      a buffer for each of two devices        a buffer for each device, the graph split between them
    main_batched    one buffer each of a device             as main_backend; tokens of several sequences in one run

All build the graph of `ggjit.models.gpt2` and choose the same tokens:

    python -m ggjit.examples.gpt2.main_sched -m gpt2.gguf -p "Alice looked at" -n 16 -ngl 4

Source: ggml's examples/gpt-2.
"""
