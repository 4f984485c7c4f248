"""Stand-ins of VPC endpoints, security groups and their rules."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.providers.aws_ec2 import Ec2Resource
from tests.support.providers.resource import AutoName, RefusedError, Resource

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

_MEMBERS = {"routeTableIds": "RouteTableId", "securityGroupIds": "SecurityGroupId", "subnetIds": "SubnetId"}
_SOURCES = ("cidrIpv4", "cidrIpv6", "prefixListId", "referencedSecurityGroupId")


class VpcEndpoint(Ec2Resource):
    """aws.ec2.VpcEndpoint, gateway and interface."""

    urn_type = "aws:ec2/vpcEndpoint:VpcEndpoint"
    kind = "vpc-endpoint"
    arguments = frozenset({"policy", "privateDnsEnabled", "serviceName", "vpcEndpointType", "vpcId", *_MEMBERS})
    replace_on = frozenset({"serviceName", "vpcEndpointType", "vpcId"})
    computed = frozenset({"policy", "privateDnsEnabled", *_MEMBERS})
    documents = frozenset({"policy"})
    defaults: ClassVar[dict[str, Any]] = {"vpcEndpointType": "Gateway"}

    def create(self, inputs: Plain) -> str:
        options: Plain = {f"{api_name}s": inputs[name] for name, api_name in _MEMBERS.items() if inputs.get(name)}
        if policy := inputs.get("policy"):
            options["PolicyDocument"] = policy
        if inputs["vpcEndpointType"] == "Interface":
            options["PrivateDnsEnabled"] = bool(inputs.get("privateDnsEnabled"))
        made = self.client("ec2").create_vpc_endpoint(
            VpcId=inputs["vpcId"],
            ServiceName=inputs["serviceName"],
            VpcEndpointType=inputs["vpcEndpointType"],
            **options,
            **self.tags_at_creation(inputs),
        )
        return str(made["VpcEndpoint"]["VpcEndpointId"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        ec2 = self.client("ec2")
        found = ec2.describe_vpc_endpoints(VpcEndpointIds=[resource_id])["VpcEndpoints"]
        if not found or found[0]["State"] in {"deleted", "deleting"}:
            return None
        endpoint = found[0]
        prefix_lists = ec2.describe_prefix_lists(
            Filters=[{"Name": "prefix-list-name", "Values": [endpoint["ServiceName"]]}]
        )["PrefixLists"]
        gateway = endpoint["VpcEndpointType"] == "Gateway"
        return self.told(resource_id, endpoint) | {
            "policy": endpoint.get("PolicyDocument"),
            "prefixListId": prefix_lists[0]["PrefixListId"] if gateway and prefix_lists else None,
            "privateDnsEnabled": endpoint.get("PrivateDnsEnabled"),
            "routeTableIds": endpoint.get("RouteTableIds", []),
            "securityGroupIds": [group["GroupId"] for group in endpoint.get("Groups", [])],
            "serviceName": endpoint["ServiceName"],
            "state": endpoint["State"],
            "subnetIds": endpoint.get("SubnetIds", []),
            "vpcEndpointType": endpoint["VpcEndpointType"],
            "vpcId": endpoint["VpcId"],
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        super().update(resource_id, old, new, changed)
        options: Plain = {}
        for name, api_name in _MEMBERS.items():
            before, after = set(old.get(name) or []), set(new.get(name) or [])
            if name in changed and (added := after - before):
                options[f"Add{api_name}s"] = sorted(added)
            if name in changed and (removed := before - after):
                options[f"Remove{api_name}s"] = sorted(removed)
        if "policy" in changed and (policy := new.get("policy")):
            options["PolicyDocument"] = policy
        if "privateDnsEnabled" in changed:
            options["PrivateDnsEnabled"] = bool(new["privateDnsEnabled"])
        if options:
            self.client("ec2").modify_vpc_endpoint(VpcEndpointId=resource_id, **options)

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").delete_vpc_endpoints(VpcEndpointIds=[resource_id])


class SecurityGroup(Ec2Resource):
    """aws.ec2.SecurityGroup without inline rules. As with the real one, AWS's allow-all egress rule is removed."""

    urn_type = "aws:ec2/securityGroup:SecurityGroup"
    kind = "security-group"
    arguments = frozenset({"description", "name", "revokeRulesOnDelete", "vpcId"})
    replace_on = frozenset({"description", "name", "vpcId"})
    computed = frozenset({"vpcId"})
    defaults: ClassVar[dict[str, Any]] = {"description": "Managed by Pulumi", "revokeRulesOnDelete": False}
    auto_name = AutoName("name", 255)

    def create(self, inputs: Plain) -> str:
        place = {"VpcId": inputs["vpcId"]} if inputs.get("vpcId") else {}
        made = self.client("ec2").create_security_group(
            GroupName=inputs["name"],
            Description=inputs["description"],
            **place,
            **self.tags_at_creation(inputs),
        )
        return str(made["GroupId"])

    def complete(self, resource_id: str, inputs: Plain) -> None:
        ec2 = self.client("ec2")
        group = self.only(ec2.describe_security_groups(GroupIds=[resource_id])["SecurityGroups"])
        if group["IpPermissionsEgress"]:
            ec2.revoke_security_group_egress(GroupId=resource_id, IpPermissions=group["IpPermissionsEgress"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        group = self.only(self.client("ec2").describe_security_groups(GroupIds=[resource_id])["SecurityGroups"])
        return self.told(resource_id, group) | {
            "description": group["Description"],
            "name": group["GroupName"],
            "vpcId": group.get("VpcId"),
        }

    def delete(self, resource_id: str, state: Plain) -> None:
        self.client("ec2").delete_security_group(GroupId=resource_id)


class _Rule(Ec2Resource):
    """One rule of a security group from or to one place."""

    kind = "security-group-rule"
    egress: ClassVar[bool]
    arguments = frozenset({"description", "fromPort", "ipProtocol", "securityGroupId", "toPort", *_SOURCES})
    replace_on = frozenset({"securityGroupId"})

    def create(self, inputs: Plain) -> str:
        permission: Plain = {"IpProtocol": inputs["ipProtocol"]}
        for name, api_name in (("fromPort", "FromPort"), ("toPort", "ToPort")):
            if name in inputs:
                permission[api_name] = inputs[name]
        permission |= self._place(inputs)
        ec2 = self.client("ec2")
        call = ec2.authorize_security_group_egress if self.egress else ec2.authorize_security_group_ingress
        made = call(GroupId=inputs["securityGroupId"], IpPermissions=[permission], **self.tags_at_creation(inputs))
        return str(made["SecurityGroupRules"][0]["SecurityGroupRuleId"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        found = self.client("ec2").describe_security_group_rules(SecurityGroupRuleIds=[resource_id])
        if not found["SecurityGroupRules"]:
            return None
        rule = found["SecurityGroupRules"][0]
        told = self.told(resource_id, rule)
        del told["ownerId"]
        anything = rule["IpProtocol"] == "-1"
        return told | {
            "cidrIpv4": rule.get("CidrIpv4"),
            "cidrIpv6": rule.get("CidrIpv6"),
            "description": rule.get("Description"),
            "fromPort": None if anything else rule.get("FromPort"),
            "ipProtocol": rule["IpProtocol"],
            "prefixListId": rule.get("PrefixListId"),
            "referencedSecurityGroupId": rule.get("ReferencedGroupInfo", {}).get("GroupId"),
            "securityGroupId": rule["GroupId"],
            "securityGroupRuleId": resource_id,
            "toPort": None if anything else rule.get("ToPort"),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        super().update(resource_id, old, new, changed)
        if changed <= {"tagsAll", "tags"}:
            return
        rule: Plain = {"IpProtocol": new["ipProtocol"], "Description": new.get("description", "")}
        names = {"fromPort": "FromPort", "toPort": "ToPort", "cidrIpv4": "CidrIpv4", "cidrIpv6": "CidrIpv6"}
        names |= {"prefixListId": "PrefixListId", "referencedSecurityGroupId": "ReferencedGroupId"}
        rule |= {api_name: new[name] for name, api_name in names.items() if new.get(name) is not None}
        self.client("ec2").modify_security_group_rules(
            GroupId=new["securityGroupId"],
            SecurityGroupRules=[{"SecurityGroupRuleId": resource_id, "SecurityGroupRule": rule}],
        )

    def delete(self, resource_id: str, state: Plain) -> None:
        ec2 = self.client("ec2")
        call = ec2.revoke_security_group_egress if self.egress else ec2.revoke_security_group_ingress
        call(GroupId=state["securityGroupId"], SecurityGroupRuleIds=[resource_id])

    def _place(self, inputs: Plain) -> Plain:
        given = [name for name in _SOURCES if inputs.get(name)]
        if len(given) != 1:
            raise RefusedError(f"a security group rule takes exactly one of {', '.join(_SOURCES)}")
        value = inputs[given[0]]
        described = {"Description": inputs["description"]} if inputs.get("description") else {}
        return {
            "cidrIpv4": {"IpRanges": [{"CidrIp": value, **described}]},
            "cidrIpv6": {"Ipv6Ranges": [{"CidrIpv6": value, **described}]},
            "prefixListId": {"PrefixListIds": [{"PrefixListId": value, **described}]},
            "referencedSecurityGroupId": {"UserIdGroupPairs": [{"GroupId": value, **described}]},
        }[given[0]]


class EgressRule(_Rule):
    """aws.vpc.SecurityGroupEgressRule."""

    urn_type = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
    egress = True


class IngressRule(_Rule):
    """aws.vpc.SecurityGroupIngressRule."""

    urn_type = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
    egress = False


RESOURCES: tuple[type[Resource], ...] = (VpcEndpoint, SecurityGroup, EgressRule, IngressRule)
