output "store_url" {
  description = "store.url of the profile"
  value       = "s3://${aws_s3_bucket.store.bucket}/cuda-agent"
}

output "database_address" {
  description = "host of PostgreSQL"
  value       = aws_db_instance.services.address
}

output "database_secret" {
  description = "secret that holds its user and password"
  value       = aws_db_instance.services.master_user_secret[0].secret_arn
}

output "roles" {
  description = "role of each service account: annotate it with eks.amazonaws.com/role-arn"
  value       = { for name, role in aws_iam_role.account : local.accounts[name].account => role.arn }
}
