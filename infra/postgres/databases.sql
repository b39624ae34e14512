-- One server, two databases: Prefect's and MLflow's. Each program makes and migrates its own tables when it starts.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
