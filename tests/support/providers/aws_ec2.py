"""Stand-ins of aws.ec2: a VPC, its subnets, and the ways in and out. Ids are AWS's own."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.providers.resource import RefusedError, Resource
from tests.support.providers.session import PARTITION, tag_list, tag_map

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

_VPC_SWITCHES = {"enableDnsHostnames": "EnableDnsHostnames", "enableDnsSupport": "EnableDnsSupport"}


class Ec2Resource(Resource):
    """Tags at creation, tags changed in place, and an ARN from the id."""

    tagged = True
    kind: ClassVar[str]
    """What TagSpecifications and ARNs call it."""

    def tags_at_creation(self, inputs: Plain) -> Plain:
        tags = tag_list(inputs["tagsAll"])
        return {"TagSpecifications": [{"ResourceType": self.kind, "Tags": tags}]} if tags else {}

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        ec2 = self.client("ec2")
        if gone := sorted(old.get("tagsAll", {}).keys() - new.get("tagsAll", {}).keys()):
            ec2.delete_tags(Resources=[resource_id], Tags=[{"Key": key} for key in gone])
        if "tagsAll" in changed and new["tagsAll"]:
            ec2.create_tags(Resources=[resource_id], Tags=tag_list(new["tagsAll"]))

    def told(self, resource_id: str, found: Plain) -> Plain:
        """What all of them tell."""
        owner = found.get("OwnerId") or self.session.account
        return {
            "arn": f"arn:{PARTITION}:ec2:{self.region}:{owner}:{self.kind}/{resource_id}",
            "ownerId": owner,
            "tagsAll": tag_map(found.get("Tags")),
        }


class Vpc(Ec2Resource):
    """aws.ec2.Vpc, IPv4."""

    urn_type = "aws:ec2/vpc:Vpc"
    kind = "vpc"
    arguments = frozenset({"cidrBlock", "instanceTenancy", *_VPC_SWITCHES})
    replace_on = frozenset({"cidrBlock"})
    computed = frozenset({"cidrBlock", "enableDnsHostnames"})
    defaults: ClassVar[dict[str, Any]] = {"enableDnsSupport": True, "instanceTenancy": "default"}

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").create_vpc(
            CidrBlock=inputs["cidrBlock"],
            InstanceTenancy=inputs["instanceTenancy"],
            **self.tags_at_creation(inputs),
        )
        return str(made["Vpc"]["VpcId"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        self._switch(resource_id, inputs, frozenset(_VPC_SWITCHES))

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        ec2 = self.client("ec2")
        vpc = self.only(ec2.describe_vpcs(VpcIds=[resource_id])["Vpcs"])
        of_vpc = [{"Name": "vpc-id", "Values": [resource_id]}]
        main = ec2.describe_route_tables(Filters=[*of_vpc, {"Name": "association.main", "Values": ["true"]}])
        groups = ec2.describe_security_groups(Filters=[*of_vpc, {"Name": "group-name", "Values": ["default"]}])
        switches = {
            name: ec2.describe_vpc_attribute(VpcId=resource_id, Attribute=name)[api_name]["Value"]
            for name, api_name in _VPC_SWITCHES.items()
        }
        return (
            self.told(resource_id, vpc)
            | switches
            | {
                "cidrBlock": vpc["CidrBlock"],
                "defaultSecurityGroupId": next((group["GroupId"] for group in groups["SecurityGroups"]), None),
                "dhcpOptionsId": vpc.get("DhcpOptionsId"),
                "instanceTenancy": vpc["InstanceTenancy"],
                "mainRouteTableId": next((table["RouteTableId"] for table in main["RouteTables"]), None),
            }
        )

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        super().update(resource_id, old, new, changed)
        self._switch(resource_id, new, changed)

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").delete_vpc(VpcId=resource_id)

    def _switch(self, resource_id: str, inputs: Plain, changed: frozenset[str]) -> None:
        for name, api_name in _VPC_SWITCHES.items():
            if name in inputs and name in changed:
                setting = {api_name: {"Value": bool(inputs[name])}}
                self.client("ec2").modify_vpc_attribute(VpcId=resource_id, **setting)


class Subnet(Ec2Resource):
    """aws.ec2.Subnet, IPv4."""

    urn_type = "aws:ec2/subnet:Subnet"
    kind = "subnet"
    arguments = frozenset({"availabilityZone", "availabilityZoneId", "cidrBlock", "mapPublicIpOnLaunch", "vpcId"})
    replace_on = frozenset({"availabilityZone", "availabilityZoneId", "cidrBlock", "vpcId"})
    computed = frozenset({"availabilityZone", "availabilityZoneId"})
    defaults: ClassVar[dict[str, Any]] = {"mapPublicIpOnLaunch": False}

    def create(self, inputs: Plain) -> str:
        zone = {
            "AvailabilityZone": inputs.get("availabilityZone"),
            "AvailabilityZoneId": inputs.get("availabilityZoneId"),
        }
        made = self.client("ec2").create_subnet(
            VpcId=inputs["vpcId"],
            CidrBlock=inputs["cidrBlock"],
            **{name: value for name, value in zone.items() if value},
            **self.tags_at_creation(inputs),
        )
        return str(made["Subnet"]["SubnetId"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        if inputs["mapPublicIpOnLaunch"]:
            self._map_public(resource_id, inputs)

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        subnet = self.only(self.client("ec2").describe_subnets(SubnetIds=[resource_id])["Subnets"])
        return self.told(resource_id, subnet) | {
            "availabilityZone": subnet["AvailabilityZone"],
            "availabilityZoneId": subnet["AvailabilityZoneId"],
            "cidrBlock": subnet["CidrBlock"],
            "mapPublicIpOnLaunch": subnet["MapPublicIpOnLaunch"],
            "vpcId": subnet["VpcId"],
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        super().update(resource_id, old, new, changed)
        if "mapPublicIpOnLaunch" in changed:
            self._map_public(resource_id, new)

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").delete_subnet(SubnetId=resource_id)

    def _map_public(self, resource_id: str, inputs: Plain) -> None:
        value = {"Value": bool(inputs["mapPublicIpOnLaunch"])}
        self.client("ec2").modify_subnet_attribute(SubnetId=resource_id, MapPublicIpOnLaunch=value)


class RouteTable(Ec2Resource):
    """aws.ec2.RouteTable without inline routes."""

    urn_type = "aws:ec2/routeTable:RouteTable"
    kind = "route-table"
    arguments = replace_on = frozenset({"vpcId"})

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").create_route_table(VpcId=inputs["vpcId"], **self.tags_at_creation(inputs))
        return str(made["RouteTable"]["RouteTableId"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        table = self.only(self.client("ec2").describe_route_tables(RouteTableIds=[resource_id])["RouteTables"])
        return self.told(resource_id, table) | {"vpcId": table["VpcId"]}

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").delete_route_table(RouteTableId=resource_id)


class Route(Resource):
    """aws.ec2.Route to an internet or NAT gateway; its id is `table_destination`."""

    urn_type = "aws:ec2/route:Route"
    targets: ClassVar[dict[str, str]] = {"gatewayId": "GatewayId", "natGatewayId": "NatGatewayId"}
    arguments = frozenset({"destinationCidrBlock", "routeTableId", *targets})
    replace_on = frozenset({"destinationCidrBlock", "routeTableId"})
    computed = frozenset(targets)

    def create(self, inputs: Plain) -> str:
        table, destination = inputs["routeTableId"], inputs["destinationCidrBlock"]
        self.client("ec2").create_route(RouteTableId=table, DestinationCidrBlock=destination, **self._target(inputs))
        return f"{table}_{destination}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        table_id, destination = resource_id.split("_", 1)
        table = self.only(self.client("ec2").describe_route_tables(RouteTableIds=[table_id])["RouteTables"])
        for route in table["Routes"]:
            if route.get("DestinationCidrBlock") == destination:
                return {
                    "destinationCidrBlock": destination,
                    "gatewayId": route.get("GatewayId"),
                    "natGatewayId": route.get("NatGatewayId"),
                    "origin": route["Origin"],
                    "routeTableId": table_id,
                    "state": route["State"],
                }
        return None

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        self.client("ec2").replace_route(
            RouteTableId=new["routeTableId"],
            DestinationCidrBlock=new["destinationCidrBlock"],
            **self._target(new),
        )

    def delete(self, resource_id: str, state: Plain) -> None:
        table_id, destination = resource_id.split("_", 1)
        self.client("ec2").delete_route(RouteTableId=table_id, DestinationCidrBlock=destination)

    def _target(self, inputs: Plain) -> Plain:
        given = {api_name: inputs[name] for name, api_name in self.targets.items() if inputs.get(name)}
        if len(given) != 1:
            raise RefusedError(f"a route takes exactly one of {', '.join(sorted(self.targets))}")
        return given


class RouteTableAssociation(Resource):
    """aws.ec2.RouteTableAssociation of a subnet."""

    urn_type = "aws:ec2/routeTableAssociation:RouteTableAssociation"
    arguments = frozenset({"routeTableId", "subnetId"})
    replace_on = frozenset({"subnetId"})

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").associate_route_table(
            RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"]
        )
        return str(made["AssociationId"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        for page in self.client("ec2").get_paginator("describe_route_tables").paginate():
            for table in page["RouteTables"]:
                for link in table["Associations"]:
                    if link["RouteTableAssociationId"] == resource_id:
                        return {"routeTableId": table["RouteTableId"], "subnetId": link.get("SubnetId")}
        return None

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        # EC2 answers with a new id, which the real provider takes over; the engine keeps ids, so neither is exact.
        raise RefusedError("the stand-in can't move a route table association to another table")

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").disassociate_route_table(AssociationId=resource_id)


class InternetGateway(Ec2Resource):
    """aws.ec2.InternetGateway attached to a VPC."""

    urn_type = "aws:ec2/internetGateway:InternetGateway"
    kind = "internet-gateway"
    arguments = frozenset({"vpcId"})
    computed = frozenset({"vpcId"})

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").create_internet_gateway(**self.tags_at_creation(inputs))
        return str(made["InternetGateway"]["InternetGatewayId"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        if vpc := inputs.get("vpcId"):
            self.client("ec2").attach_internet_gateway(InternetGatewayId=resource_id, VpcId=vpc)

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.only(
            self.client("ec2").describe_internet_gateways(InternetGatewayIds=[resource_id])["InternetGateways"]
        )
        vpcs = [link["VpcId"] for link in found["Attachments"]]
        return self.told(resource_id, found) | {"vpcId": vpcs[0] if vpcs else None}

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        super().update(resource_id, old, new, changed)
        if "vpcId" in changed:
            self._detach(resource_id, old)
            self.complete(resource_id, new)

    def delete(self, resource_id: str, state: Plain) -> None:
        self._detach(resource_id, state)
        self.client("ec2").delete_internet_gateway(InternetGatewayId=resource_id)

    def _detach(self, resource_id: str, state: Plain) -> None:
        if vpc := state.get("vpcId"):
            self.client("ec2").detach_internet_gateway(InternetGatewayId=resource_id, VpcId=vpc)


class Eip(Ec2Resource):
    """aws.ec2.Eip: an address of the VPC kind; its id is its allocation's."""

    urn_type = "aws:ec2/eip:Eip"
    kind = "elastic-ip"
    arguments = replace_on = computed = frozenset({"domain"})

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").allocate_address(Domain="vpc", **self.tags_at_creation(inputs))
        return str(made["AllocationId"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.only(self.client("ec2").describe_addresses(AllocationIds=[resource_id])["Addresses"])
        told = self.told(resource_id, found)
        del told["ownerId"]
        return told | {
            "allocationId": resource_id,
            "associationId": found.get("AssociationId"),
            "domain": found["Domain"],
            "publicIp": found["PublicIp"],
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").release_address(AllocationId=resource_id)


class NatGateway(Ec2Resource):
    """aws.ec2.NatGateway: a public one on one address."""

    urn_type = "aws:ec2/natGateway:NatGateway"
    kind = "natgateway"
    arguments = replace_on = frozenset({"allocationId", "connectivityType", "subnetId"})
    defaults: ClassVar[dict[str, Any]] = {"connectivityType": "public"}

    def create(self, inputs: Plain) -> str:
        made = self.client("ec2").create_nat_gateway(
            AllocationId=inputs["allocationId"],
            ConnectivityType=inputs["connectivityType"],
            SubnetId=inputs["subnetId"],
            **self.tags_at_creation(inputs),
        )
        resource_id = str(made["NatGateway"]["NatGatewayId"])
        self.client("ec2").get_waiter("nat_gateway_available").wait(NatGatewayIds=[resource_id])
        return resource_id

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("ec2").describe_nat_gateways(NatGatewayIds=[resource_id])["NatGateways"]
        if not found or found[0]["State"] in {"deleted", "deleting"}:
            return None
        addresses = found[0]["NatGatewayAddresses"]
        return {
            "allocationId": addresses[0].get("AllocationId") if addresses else None,
            "connectivityType": found[0]["ConnectivityType"],
            "publicIp": addresses[0].get("PublicIp") if addresses else None,
            "subnetId": found[0]["SubnetId"],
            "tagsAll": tag_map(found[0].get("Tags")),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        ec2 = self.client("ec2")
        ec2.delete_nat_gateway(NatGatewayId=resource_id)
        ec2.get_waiter("nat_gateway_deleted").wait(NatGatewayIds=[resource_id])


RESOURCES: tuple[type[Resource], ...] = (
    Vpc,
    Subnet,
    RouteTable,
    Route,
    RouteTableAssociation,
    InternetGateway,
    Eip,
    NatGateway,
)
