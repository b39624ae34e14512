"""Files that every exported Harbor task contains: the test, and the script that asks the judge.

They run in containers that have Python and nothing of this project.
"""
