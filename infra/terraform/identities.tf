# Pods get short-lived credentials by their service account: no key is made, none can leak.
locals {
  accounts = {
    # Flows read and write; deleting is left to a person with the keeper's role.
    flow    = { account = "cuda-agent-flow", actions = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"] }
    service = { account = "cuda-agent-service", actions = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"] }
    keeper  = { account = "cuda-agent-keeper", actions = ["s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"] }
  }
}

data "aws_iam_policy_document" "trust" {
  for_each = local.accounts
  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]
    principals {
      type        = "Federated"
      identifiers = [var.oidc_provider_arn]
    }
    condition {
      test     = "StringEquals"
      variable = "${var.oidc_provider_url}:sub"
      values   = ["system:serviceaccount:cuda-agent:${each.value.account}"]
    }
  }
}

data "aws_iam_policy_document" "store" {
  for_each = local.accounts
  statement {
    actions   = each.value.actions
    resources = each.key == "service" ? ["${aws_s3_bucket.store.arn}/mlflow/*"] : ["${aws_s3_bucket.store.arn}/*"]
  }
  statement {
    actions   = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.store.arn]
  }
}

resource "aws_iam_role" "account" {
  for_each           = local.accounts
  name               = "${var.name}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.trust[each.key].json
}

resource "aws_iam_role_policy" "store" {
  for_each = local.accounts
  name     = "store"
  role     = aws_iam_role.account[each.key].id
  policy   = data.aws_iam_policy_document.store[each.key].json
}
