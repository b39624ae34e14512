variable "name" {
  description = "prefix of everything that is made here"
  type        = string
  default     = "cuda-agent"
}

variable "region" {
  description = "AWS region"
  type        = string
}

variable "bucket" {
  description = "name of the bucket, unique in the world"
  type        = string
}

variable "vpc_id" {
  description = "network that the cluster and the database are in"
  type        = string
}

variable "subnet_ids" {
  description = "at least two private subnets for the database"
  type        = list(string)
}

variable "cluster_security_group_id" {
  description = "security group of the nodes that may reach the database"
  type        = string
}

variable "oidc_provider_arn" {
  description = "OpenID Connect provider of the Kubernetes cluster, for identities without long-lived keys"
  type        = string
}

variable "oidc_provider_url" {
  description = "its address without https://"
  type        = string
}

variable "database_class" {
  description = "instance class of the database"
  type        = string
  default     = "db.t4g.medium"
}

variable "backup_days" {
  description = "days that the database's automatic back-ups are kept"
  type        = number
  default     = 14
}
