"""A program that breaks every rule of the policy pack: what the pack must stop on the real engine."""

from __future__ import annotations

import json

import pulumi_aws as aws


def _policy(**statement: object) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement}]})


bucket = aws.s3.Bucket("bare")
configured = aws.s3.Bucket("open")
aws.s3.BucketPublicAccessBlock("open", bucket=configured.bucket)
aws.s3.BucketOwnershipControls("open", bucket=configured.bucket, rule={"object_ownership": "ObjectWriter"})
aws.s3.BucketServerSideEncryptionConfiguration("open", bucket=configured.bucket, rules=[{"bucket_key_enabled": True}])
aws.s3.BucketLifecycleConfiguration(
    "open",
    bucket=configured.bucket,
    rules=[{"id": "expire", "status": "Enabled", "expiration": {"days": 1}}],
)
aws.s3.BucketPolicy(
    "open", bucket=configured.bucket, policy=_policy(Principal="*", Action="s3:GetObject", Resource="arn:aws:s3:::x/*")
)
aws.kms.Key("open", policy=_policy(Principal="*", Action="kms:*", Resource="*"))
aws.ecr.Repository("open", image_tag_mutability="MUTABLE", image_scanning_configuration={"scan_on_push": False})
aws.iam.Role("open", assume_role_policy=_policy(Principal={"AWS": "*"}, Action="sts:AssumeRole"))
aws.iam.Policy("actions", policy=_policy(Action="s3:*", Resource="arn:aws:s3:::x"))
aws.iam.Policy("resources", policy=_policy(Action="s3:GetObject", Resource="*"))
aws.iam.Policy("roles", policy=_policy(Action="iam:PassRole", Resource="arn:aws:iam::123456789012:role/*"))
group = aws.ec2.SecurityGroup("open")
aws.vpc.SecurityGroupIngressRule(
    "open", security_group_id=group.id, ip_protocol="tcp", from_port=22, to_port=22, cidr_ipv4="0.0.0.0/0"
)
aws.vpc.SecurityGroupEgressRule("open", security_group_id=group.id, ip_protocol="-1", cidr_ipv4="0.0.0.0/0")
aws.ec2.Subnet("open", vpc_id="vpc-1", cidr_block="10.0.0.0/24", map_public_ip_on_launch=True)
aws.eks.Cluster(
    "open",
    role_arn="arn:aws:iam::123456789012:role/open",
    vpc_config={"subnet_ids": ["subnet-1", "subnet-2"], "endpoint_public_access": True},
    access_config={"authentication_mode": "CONFIG_MAP"},
)
