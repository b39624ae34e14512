"""Sampling with vLLM servers: a client of one server, a fleet of them, and pushes of new weights to all.

A fleet is several servers with the same model, and a push replaces the weights of all of them. Other packages
use `sampler.VllmSampler`, `own_servers` and `start`. vLLM itself imports `worker`. Start with `sampler.py`.
"""
