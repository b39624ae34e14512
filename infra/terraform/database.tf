# One PostgreSQL for Prefect and MLflow, a database each (infra/postgres/databases.sql). AWS keeps the password.
resource "aws_db_subnet_group" "services" {
  name       = var.name
  subnet_ids = var.subnet_ids
}

resource "aws_security_group" "database" {
  name   = "${var.name}-database"
  vpc_id = var.vpc_id
}

resource "aws_vpc_security_group_ingress_rule" "database" {
  security_group_id            = aws_security_group.database.id
  referenced_security_group_id = var.cluster_security_group_id
  from_port                    = 5432
  to_port                      = 5432
  ip_protocol                  = "tcp"
}

resource "aws_db_instance" "services" {
  identifier                  = var.name
  engine                      = "postgres"
  engine_version              = "17"
  instance_class              = var.database_class
  allocated_storage           = 20
  max_allocated_storage       = 200
  storage_encrypted           = true
  multi_az                    = true
  username                    = "cuda_agent"
  manage_master_user_password = true
  db_subnet_group_name        = aws_db_subnet_group.services.name
  vpc_security_group_ids      = [aws_security_group.database.id]
  backup_retention_period     = var.backup_days
  deletion_protection         = true
  skip_final_snapshot         = false
  final_snapshot_identifier   = "${var.name}-final"
}
