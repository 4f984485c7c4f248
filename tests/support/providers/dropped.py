"""Fields that MiniStack takes and forgets, or never tells: the stand-in repeats them from its own state.

Drift of these can't be found here. `tests/infra/test_providers.py` checks that each of them is still dropped.
"""

from __future__ import annotations

DROPPED: dict[str, dict[str, str]] = {
    "aws:ec2/vpcEndpoint:VpcEndpoint": {
        "policy": "gateway and interface endpoints keep no policy document",
        "privateDnsEnabled": "not told by DescribeVpcEndpoints",
        "securityGroupIds": "interface endpoints keep no groups",
    },
    "aws:ec2/natGateway:NatGateway": {"allocationId": "DescribeNatGateways has an empty NatGatewayAddresses"},
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": {
        "prefixListId": "a rule on a prefix list is kept without it",
        "description": "of a rule on a prefix list",
    },
}
