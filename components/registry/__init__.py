"""MLflow runs, model versions, gates, and the promotion of versions with its audit chain.

Gates are the conditions under which a version becomes the champion (the promoted version), and the audit
chain is the signed log of all decisions on versions. This package imports `evaluation`. Besides `flows`, it
is the only package that imports MLflow. Start with `promotion.py`.
"""
