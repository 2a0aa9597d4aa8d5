"""Serve a GGUF file by llama.cpp for ``--emad-decoder URL``: ``python llama_cpp_server.py FILE.gguf PORT``.

Float32 to the end: by default K and V are float16, and flash attention rounds, too. It serves until it is interrupted.
"""

import signal
import sys

import xllamacpp

SLOTS, WINDOW = 8, 512  # requests at once, and positions of each

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.kv_unified = SLOTS, SLOTS * WINDOW, False
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
