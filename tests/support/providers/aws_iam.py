"""Stand-ins of aws.iam: roles, policies, and what ties them together."""

# ruff: noqa: ARG002 (a resource's calls have one signature)
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from tests.support.providers.resource import AutoName, RefusedError, Resource
from tests.support.providers.session import tag_list, tag_map

if TYPE_CHECKING:
    from tests.support.providers.values import Plain

_POLICY_VERSIONS = 5  # IAM's quota; the provider removes the oldest to make room


class Role(Resource):
    """aws.iam.Role without inline and managed policies, which have resources of their own."""

    urn_type = "aws:iam/role:Role"
    arguments = frozenset(
        {
            "assumeRolePolicy",
            "description",
            "forceDetachPolicies",
            "maxSessionDuration",
            "name",
            "path",
            "permissionsBoundary",
        }
    )
    replace_on = frozenset({"name", "path"})
    documents = frozenset({"assumeRolePolicy"})
    defaults: ClassVar[dict[str, Any]] = {"forceDetachPolicies": False, "maxSessionDuration": 3600, "path": "/"}
    auto_name = AutoName("name", 64)
    tagged = True
    regional = False

    def create(self, inputs: Plain) -> str:
        options = {
            "Description": inputs.get("description"),
            "PermissionsBoundary": inputs.get("permissionsBoundary"),
            "Tags": tag_list(inputs["tagsAll"]),
        }
        self.client("iam").create_role(
            RoleName=inputs["name"],
            AssumeRolePolicyDocument=inputs["assumeRolePolicy"],
            MaxSessionDuration=inputs["maxSessionDuration"],
            Path=inputs["path"],
            **{name: value for name, value in options.items() if value},
        )
        return str(inputs["name"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        role = self.client("iam").get_role(RoleName=resource_id)["Role"]
        return {
            "arn": role["Arn"],
            "assumeRolePolicy": document_text(role["AssumeRolePolicyDocument"]),
            "createDate": role["CreateDate"].isoformat(),
            "description": role.get("Description"),
            "maxSessionDuration": role["MaxSessionDuration"],
            "name": role["RoleName"],
            "path": role["Path"],
            "permissionsBoundary": role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn"),
            "uniqueId": role["RoleId"],
            "tagsAll": tag_map(role.get("Tags")),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        iam = self.client("iam")
        if "assumeRolePolicy" in changed:
            iam.update_assume_role_policy(RoleName=resource_id, PolicyDocument=new["assumeRolePolicy"])
        if changed & {"description", "maxSessionDuration"}:
            iam.update_role(
                RoleName=resource_id,
                Description=new.get("description", ""),
                MaxSessionDuration=new["maxSessionDuration"],
            )
        if "permissionsBoundary" in changed:
            if boundary := new.get("permissionsBoundary"):
                iam.put_role_permissions_boundary(RoleName=resource_id, PermissionsBoundary=boundary)
            else:
                iam.delete_role_permissions_boundary(RoleName=resource_id)
        if gone := sorted(old.get("tagsAll", {}).keys() - new["tagsAll"].keys()):
            iam.untag_role(RoleName=resource_id, TagKeys=gone)
        if "tagsAll" in changed and new["tagsAll"]:
            iam.tag_role(RoleName=resource_id, Tags=tag_list(new["tagsAll"]))

    def delete(self, resource_id: str, state: Plain) -> None:
        iam = self.client("iam")
        if state.get("forceDetachPolicies"):
            for policy in iam.list_attached_role_policies(RoleName=resource_id)["AttachedPolicies"]:
                iam.detach_role_policy(RoleName=resource_id, PolicyArn=policy["PolicyArn"])
            for name in iam.list_role_policies(RoleName=resource_id)["PolicyNames"]:
                iam.delete_role_policy(RoleName=resource_id, PolicyName=name)
        if left := iam.list_attached_role_policies(RoleName=resource_id)["AttachedPolicies"]:
            names = ", ".join(policy["PolicyName"] for policy in left)
            raise RefusedError(f"deleting IAM Role ({resource_id}): DeleteConflict: {names} must be detached first")
        if left := iam.list_role_policies(RoleName=resource_id)["PolicyNames"]:
            raise RefusedError(f"deleting IAM Role ({resource_id}): DeleteConflict: it has inline policies {left}")
        iam.delete_role(RoleName=resource_id)


class RolePolicy(Resource):
    """aws.iam.RolePolicy: an inline policy; its id is `role:name`."""

    urn_type = "aws:iam/rolePolicy:RolePolicy"
    arguments = frozenset({"name", "policy", "role"})
    replace_on = frozenset({"name", "role"})
    documents = frozenset({"policy"})
    auto_name = AutoName("name", 128)
    regional = False

    def create(self, inputs: Plain) -> str:
        self._put(inputs["role"], inputs["name"], inputs["policy"])
        return f"{inputs['role']}:{inputs['name']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        role, name = resource_id.split(":", 1)
        found = self.client("iam").get_role_policy(RoleName=role, PolicyName=name)
        return {"role": role, "name": name, "policy": document_text(found["PolicyDocument"])}

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        self._put(new["role"], new["name"], new["policy"])

    def delete(self, resource_id: str, state: Plain) -> None:
        role, name = resource_id.split(":", 1)
        self.client("iam").delete_role_policy(RoleName=role, PolicyName=name)

    def _put(self, role: str, name: str, policy: str) -> None:
        self.client("iam").put_role_policy(RoleName=role, PolicyName=name, PolicyDocument=policy)


class Policy(Resource):
    """aws.iam.Policy: a managed policy, whose id is its ARN and whose change is a new version."""

    urn_type = "aws:iam/policy:Policy"
    arguments = frozenset({"description", "name", "path", "policy"})
    replace_on = frozenset({"description", "name", "path"})
    documents = frozenset({"policy"})
    defaults: ClassVar[dict[str, Any]] = {"path": "/"}
    auto_name = AutoName("name", 128)
    tagged = True
    regional = False

    def create(self, inputs: Plain) -> str:
        options = {"Description": inputs.get("description"), "Tags": tag_list(inputs["tagsAll"])}
        made = self.client("iam").create_policy(
            PolicyName=inputs["name"],
            PolicyDocument=inputs["policy"],
            Path=inputs["path"],
            **{name: value for name, value in options.items() if value},
        )
        return str(made["Policy"]["Arn"])

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        iam = self.client("iam")
        found = iam.get_policy(PolicyArn=resource_id)["Policy"]
        version = iam.get_policy_version(PolicyArn=resource_id, VersionId=found["DefaultVersionId"])["PolicyVersion"]
        return {
            "arn": found["Arn"],
            "attachmentCount": found.get("AttachmentCount", 0),
            "description": found.get("Description") or None,
            "name": found["PolicyName"],
            "path": found["Path"],
            "policy": document_text(version["Document"]),
            "policyId": found["PolicyId"],
            "tagsAll": tag_map(iam.list_policy_tags(PolicyArn=resource_id).get("Tags")),
        }

    def update(self, resource_id: str, old: Plain, new: Plain, changed: frozenset[str]) -> None:
        iam = self.client("iam")
        if "policy" in changed:
            versions = iam.list_policy_versions(PolicyArn=resource_id)["Versions"]
            if len(versions) >= _POLICY_VERSIONS:
                oldest = min(
                    (one for one in versions if not one["IsDefaultVersion"]), key=lambda one: one["CreateDate"]
                )
                iam.delete_policy_version(PolicyArn=resource_id, VersionId=oldest["VersionId"])
            iam.create_policy_version(PolicyArn=resource_id, PolicyDocument=new["policy"], SetAsDefault=True)
        if gone := sorted(old.get("tagsAll", {}).keys() - new["tagsAll"].keys()):
            iam.untag_policy(PolicyArn=resource_id, TagKeys=gone)
        if "tagsAll" in changed and new["tagsAll"]:
            iam.tag_policy(PolicyArn=resource_id, Tags=tag_list(new["tagsAll"]))

    def delete(self, resource_id: str, state: Plain) -> None:
        iam = self.client("iam")
        for version in iam.list_policy_versions(PolicyArn=resource_id)["Versions"]:
            if not version["IsDefaultVersion"]:
                iam.delete_policy_version(PolicyArn=resource_id, VersionId=version["VersionId"])
        iam.delete_policy(PolicyArn=resource_id)


class _Attachment(Resource):
    """A managed policy on a principal; its id is `principal/policy-arn`."""

    kind: ClassVar[str]
    regional = False

    def create(self, inputs: Plain) -> str:
        self._call("attach", inputs[self.kind], inputs["policyArn"])
        return f"{inputs[self.kind]}/{inputs['policyArn']}"

    def read(self, resource_id: str, state: Plain) -> Plain | None:
        principal, policy_arn = resource_id.split("/", 1)
        pages = self.client("iam").get_paginator(f"list_attached_{self.kind}_policies")
        for page in pages.paginate(**{f"{self.kind.capitalize()}Name": principal}):
            if policy_arn in {policy["PolicyArn"] for policy in page["AttachedPolicies"]}:
                return {self.kind: principal, "policyArn": policy_arn}
        return None

    def delete(self, resource_id: str, state: Plain) -> None:
        self._call("detach", *resource_id.split("/", 1))

    def _call(self, verb: str, principal: str, policy_arn: str) -> None:
        call = getattr(self.client("iam"), f"{verb}_{self.kind}_policy")
        call(**{f"{self.kind.capitalize()}Name": principal, "PolicyArn": policy_arn})


class RolePolicyAttachment(_Attachment):
    """aws.iam.RolePolicyAttachment."""

    urn_type = "aws:iam/rolePolicyAttachment:RolePolicyAttachment"
    kind = "role"
    arguments = replace_on = frozenset({"role", "policyArn"})


class UserPolicyAttachment(_Attachment):
    """aws.iam.UserPolicyAttachment."""

    urn_type = "aws:iam/userPolicyAttachment:UserPolicyAttachment"
    kind = "user"
    arguments = replace_on = frozenset({"user", "policyArn"})


class GroupPolicyAttachment(_Attachment):
    """aws.iam.GroupPolicyAttachment."""

    urn_type = "aws:iam/groupPolicyAttachment:GroupPolicyAttachment"
    kind = "group"
    arguments = replace_on = frozenset({"group", "policyArn"})


def document_text(document: Any) -> str:
    """A policy as text; botocore has decoded what IAM sends URL-encoded."""
    return document if isinstance(document, str) else json.dumps(document)


RESOURCES: tuple[type[Resource], ...] = (
    Role,
    RolePolicy,
    Policy,
    RolePolicyAttachment,
    UserPolicyAttachment,
    GroupPolicyAttachment,
)
