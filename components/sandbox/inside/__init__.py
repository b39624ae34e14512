"""This package is the code that runs inside the sandbox, beside untrusted code.

Its modules import one another by their plain names and nothing of the project outside this folder, because a
sandbox contains only this folder. The judge's side imports from it only the memory layout, the messages and
the recorded extensions: `shared_memory.py`, `runner_protocol.py`, `inline_extension.py`. Start with
`zygote.py`.
"""
