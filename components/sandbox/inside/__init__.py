"""The code that runs inside the sandbox, beside untrusted code.

At run time its modules import one another by their plain names and nothing of the project outside this
folder, because a sandbox contains only this folder. The judge (the trusted process outside the sandbox)
imports from this folder only the memory layout, the messages, the extensions that candidates request, and the
input distributions: `shared_memory.py`, `runner_protocol.py`, `inline_extension.py`,
`input_distributions.py`. Start with `zygote.py`.
"""
