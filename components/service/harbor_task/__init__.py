"""Files that every exported Harbor task contains: the test, and the script that gets a verdict.

They run in containers that have Python and nothing of this project.
"""
