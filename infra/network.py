"""An optional VPC for the jobs, whose traffic with Amazon S3 costs nothing.

Every gigabyte that replicas exchange through a NAT gateway is billed; through a gateway endpoint none is. So a VPC that
is created always has that endpoint. `egress` says what else leaves it, and its cost while idle (us-west-2, 2026-11):

- none: nothing; $0.
- endpoints: ECR, CloudWatch, STS and Secrets Manager; $0.01 an hour for each of 6 endpoints in each of 2 zones, $0.12
  in all, and $0.01 a gigabyte.
- nat: the internet; $0.045 an hour and $0.045 a gigabyte, and $0.005 an hour for its address.

Prices: https://aws.amazon.com/privatelink/pricing/ and https://aws.amazon.com/vpc/pricing/.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pulumi
import pulumi_aws as aws

from infra.lookups import found

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diloco.access import Place

ZONES = 2
ENDPOINTS = ("ecr.api", "ecr.dkr", "logs", "monitoring", "secretsmanager", "sts")
"""Services that jobs use besides S3."""
ANYWHERE = "0.0.0.0/0"


@dataclass(frozen=True)
class NetworkArgs:
    """Arguments of :class:`Network`."""

    place: Place
    subnet_ids: Sequence[str] = ()
    """Of a VPC that exists; nothing is created."""
    security_group_ids: Sequence[str] = ()
    egress: Literal["none", "endpoints", "nat"] = "none"
    cidr: str = "10.42.0.0/16"
    tags: Mapping[str, str] = field(default_factory=dict)


class Network(pulumi.ComponentResource):
    """Private subnets in two zones, or those of a VPC that exists."""

    subnet_ids: pulumi.Output[Sequence[str]]
    security_group_ids: pulumi.Output[Sequence[str]]

    def __init__(self, name: str, args: NetworkArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("diloco:infra:Network", name, None, opts)
        if args.subnet_ids:
            self.subnet_ids = pulumi.Output.from_input(list(args.subnet_ids))
            self.security_group_ids = pulumi.Output.from_input(list(args.security_group_ids))
        else:
            self._create(name, args)
        self.register_outputs({"subnetIds": self.subnet_ids, "securityGroupIds": self.security_group_ids})

    def _create(self, name: str, args: NetworkArgs) -> None:
        zones = found(
            "network",
            "availability zones",
            "check aws:region",
            lambda: aws.get_availability_zones(state="available").names,
        )[:ZONES]
        blocks = [str(block) for block in ipaddress.ip_network(args.cidr).subnets(prefixlen_diff=2)]
        vpc = aws.ec2.Vpc(
            name,
            cidr_block=args.cidr,
            enable_dns_hostnames=True,
            enable_dns_support=True,
            tags=self._tags(args, name),
            opts=pulumi.ResourceOptions(parent=self),
        )
        inside = pulumi.ResourceOptions(parent=vpc)
        routes = aws.ec2.RouteTable(
            f"{name}-private", vpc_id=vpc.id, tags=self._tags(args, f"{name}-private"), opts=inside
        )
        subnets = []
        for number, zone in enumerate(zones):
            subnet = aws.ec2.Subnet(
                f"{name}-private-{number}",
                vpc_id=vpc.id,
                availability_zone=zone,
                cidr_block=blocks[number],
                map_public_ip_on_launch=False,
                tags=self._tags(args, f"{name}-private-{number}"),
                opts=inside,
            )
            aws.ec2.RouteTableAssociation(
                f"{name}-private-{number}",
                subnet_id=subnet.id,
                route_table_id=routes.id,
                opts=pulumi.ResourceOptions(parent=subnet),
            )
            subnets.append(subnet)
        s3 = aws.ec2.VpcEndpoint(
            f"{name}-s3",
            vpc_id=vpc.id,
            service_name=f"com.amazonaws.{args.place.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[routes.id],
            tags=self._tags(args, f"{name}-s3"),
            opts=inside,
        )
        group = aws.ec2.SecurityGroup(
            f"{name}-jobs",
            vpc_id=vpc.id,
            description="Training jobs: nothing comes in",
            tags=self._tags(args, f"{name}-jobs"),
            opts=inside,
        )
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-s3",
            security_group_id=group.id,
            description="Amazon S3 through its gateway endpoint",
            prefix_list_id=s3.prefix_list_id,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=group),
        )
        if args.egress == "endpoints":
            self._endpoints(name, args, vpc, group, subnets)
        elif args.egress == "nat":
            self._nat(name, args, vpc, group, routes, zones[0], blocks[ZONES])
        self.subnet_ids = pulumi.Output.all(*[subnet.id for subnet in subnets])
        self.security_group_ids = pulumi.Output.all(group.id)

    def _endpoints(
        self,
        name: str,
        args: NetworkArgs,
        vpc: aws.ec2.Vpc,
        jobs: aws.ec2.SecurityGroup,
        subnets: Sequence[aws.ec2.Subnet],
    ) -> None:
        """Interface endpoints of the services that jobs use, reached by the jobs only."""
        group = aws.ec2.SecurityGroup(
            f"{name}-endpoints",
            vpc_id=vpc.id,
            description="Interface endpoints: the jobs come in",
            tags=self._tags(args, f"{name}-endpoints"),
            opts=pulumi.ResourceOptions(parent=vpc),
        )
        aws.vpc.SecurityGroupIngressRule(
            f"{name}-endpoints",
            security_group_id=group.id,
            description="TLS from the jobs",
            referenced_security_group_id=jobs.id,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=group),
        )
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-endpoints",
            security_group_id=jobs.id,
            description="TLS to the interface endpoints",
            referenced_security_group_id=group.id,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=jobs),
        )
        for service in ENDPOINTS:
            aws.ec2.VpcEndpoint(
                f"{name}-{service}",
                vpc_id=vpc.id,
                service_name=f"com.amazonaws.{args.place.region}.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                subnet_ids=[subnet.id for subnet in subnets],
                security_group_ids=[group.id],
                tags=self._tags(args, f"{name}-{service}"),
                opts=pulumi.ResourceOptions(parent=vpc),
            )

    def _nat(
        self,
        name: str,
        args: NetworkArgs,
        vpc: aws.ec2.Vpc,
        jobs: aws.ec2.SecurityGroup,
        private: aws.ec2.RouteTable,
        zone: str,
        block: str,
    ) -> None:
        """One NAT gateway: the exchange goes around it, so a second zone's would cost more than it saves."""
        inside = pulumi.ResourceOptions(parent=vpc)
        gateway = aws.ec2.InternetGateway(name, vpc_id=vpc.id, tags=self._tags(args, name), opts=inside)
        subnet = aws.ec2.Subnet(
            f"{name}-public",
            vpc_id=vpc.id,
            availability_zone=zone,
            cidr_block=block,
            map_public_ip_on_launch=False,
            tags=self._tags(args, f"{name}-public"),
            opts=inside,
        )
        public = aws.ec2.RouteTable(
            f"{name}-public", vpc_id=vpc.id, tags=self._tags(args, f"{name}-public"), opts=inside
        )
        out = aws.ec2.Route(
            f"{name}-public",
            route_table_id=public.id,
            destination_cidr_block=ANYWHERE,
            gateway_id=gateway.id,
            opts=pulumi.ResourceOptions(parent=public),
        )
        aws.ec2.RouteTableAssociation(
            f"{name}-public", subnet_id=subnet.id, route_table_id=public.id, opts=pulumi.ResourceOptions(parent=subnet)
        )
        address = aws.ec2.Eip(name, domain="vpc", tags=self._tags(args, name), opts=inside)
        nat = aws.ec2.NatGateway(
            name,
            allocation_id=address.id,
            subnet_id=subnet.id,
            tags=self._tags(args, name),
            opts=pulumi.ResourceOptions(parent=vpc, depends_on=[out]),
        )
        aws.ec2.Route(
            f"{name}-private",
            route_table_id=private.id,
            destination_cidr_block=ANYWHERE,
            nat_gateway_id=nat.id,
            opts=pulumi.ResourceOptions(parent=private),
        )
        aws.vpc.SecurityGroupEgressRule(
            f"{name}-internet",
            security_group_id=jobs.id,
            description="TLS to the internet through the NAT gateway",
            cidr_ipv4=ANYWHERE,
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            tags=args.tags,
            opts=pulumi.ResourceOptions(parent=jobs),
        )

    @staticmethod
    def _tags(args: NetworkArgs, name: str) -> dict[str, str]:
        return {**args.tags, "Name": name}
