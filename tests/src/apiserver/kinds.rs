//! The served kinds of objects, and the routing of paths.

use std::sync::LazyLock;

/// One kind of object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) kind: &'static str,
    pub(super) short: Option<&'static str>,
    pub(super) namespaced: bool,
    /// `status`: whether the status has a path of its own.
    pub(super) has_status: bool,
    /// `generation`: whether `metadata.generation` counts changes of the spec.
    pub(super) has_generation: bool,
}

/// Version of all served kinds.
pub(super) const VERSION: &str = "v1";

/// The served kinds, in the order of discovery.
pub(super) static KINDS: LazyLock<Vec<Kind>> =
    LazyLock::new(|| TABLE.trim().lines().map(Kind::parse).collect());

/// Group, plural, kind, short name, and flags: `cluster` for kinds without namespaces, the others
/// as in [`Kind`].
const TABLE: &str = "
core namespaces Namespace ns cluster status
core nodes Node no cluster status
core pods Pod po status
core services Service svc status
core endpoints Endpoints ep
core configmaps ConfigMap cm
core secrets Secret -
core serviceaccounts ServiceAccount sa
core events Event ev
apps deployments Deployment deploy status generation
apps daemonsets DaemonSet ds status generation
apps replicasets ReplicaSet rs status generation
coordination.k8s.io leases Lease -
rbac.authorization.k8s.io roles Role -
rbac.authorization.k8s.io rolebindings RoleBinding -
rbac.authorization.k8s.io clusterroles ClusterRole - cluster
rbac.authorization.k8s.io clusterrolebindings ClusterRoleBinding - cluster
discovery.k8s.io endpointslices EndpointSlice -
networking.k8s.io servicecidrs ServiceCIDR - cluster status
events.k8s.io events Event ev
policy poddisruptionbudgets PodDisruptionBudget pdb status generation
networking.k8s.io networkpolicies NetworkPolicy netpol generation
scheduling.k8s.io priorityclasses PriorityClass pc cluster generation
authorization.k8s.io selfsubjectaccessreviews SelfSubjectAccessReview - cluster
authorization.k8s.io subjectaccessreviews SubjectAccessReview - cluster
authentication.k8s.io tokenreviews TokenReview - cluster
monitoring.coreos.com servicemonitors ServiceMonitor smon generation
monitoring.coreos.com podmonitors PodMonitor pmon generation
monitoring.coreos.com prometheusrules PrometheusRule promrule generation
certificates.k8s.io certificatesigningrequests CertificateSigningRequest csr cluster status
";

impl Kind {
    /// Parses a row of the table.
    fn parse(row: &'static str) -> Self {
        let mut words = row.split_whitespace();
        let mut next = || words.next().unwrap_or_default();
        let (group, plural, kind, short) = (next(), next(), next(), next());
        let flags: Vec<_> = words.collect();
        Self {
            group: if group == "core" { "" } else { group },
            plural,
            kind,
            short: Some(short).filter(|short| *short != "-"),
            namespaced: !flags.contains(&"cluster"),
            has_status: flags.contains(&"status"),
            has_generation: flags.contains(&"generation"),
        }
    }

    /// Returns the kind with this plural name in this group.
    pub(super) fn find(group: &str, plural: &str) -> Option<&'static Self> {
        KINDS
            .iter()
            .find(|kind| kind.group == group && kind.plural == plural)
    }

    /// Returns the first kind with this plural name in any group.
    pub(super) fn plural(plural: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.plural == plural)
    }

    /// Returns the `apiVersion`: `v1`, `apps/v1`.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() {
            VERSION.to_owned()
        } else {
            format!("{}/{VERSION}", self.group)
        }
    }

    /// Returns the name as in messages: `nodes`, `leases.coordination.k8s.io`.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// Returns whether objects of this kind are answered and not stored.
    pub(super) fn is_review(&self) -> bool {
        self.kind.ends_with("Review")
    }

    /// Returns the storage name: events of both groups are one set of objects.
    pub(super) fn storage(&self) -> &'static str {
        self.plural
    }
}

/// Returns the groups other than the core group, each once.
pub(super) fn groups() -> Vec<&'static str> {
    let mut groups = Vec::new();
    for kind in KINDS.iter() {
        if !kind.group.is_empty() && !groups.contains(&kind.group) {
            groups.push(kind.group);
        }
    }
    groups
}

/// The meaning of a request's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ApiRoute {
    /// `/api`: the core versions.
    Versions,
    /// `/apis`: the list of groups.
    Groups,
    /// `/api/v1`, `/apis/apps/v1`: the resources of a group version.
    Resources(&'static str),
    /// A collection or an object.
    Objects(Address),
    /// `/version`: the Kubernetes version.
    Version,
    /// `/livez` and the other health paths.
    Health,
    /// `/openapi/v2`: the OpenAPI document.
    OpenApi,
    /// A path that is not served.
    Unknown,
}

/// A collection or an object in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
    pub(super) subresource: Option<String>,
}

impl ApiRoute {
    /// Parses a path without its query.
    pub(super) fn of(path: &str) -> Self {
        let segments: Vec<&str> = path
            .split('/')
            .filter(|segment| !segment.is_empty())
            .collect();
        match segments.as_slice() {
            ["api"] => Self::Versions,
            ["apis"] => Self::Groups,
            ["version"] => Self::Version,
            ["healthz" | "livez" | "readyz", ..] => Self::Health,
            ["openapi", "v2"] => Self::OpenApi,
            ["api", VERSION] => Self::Resources(""),
            ["api", VERSION, rest @ ..] => Self::objects("", rest),
            ["apis", group, VERSION] => known_group(group).map_or(Self::Unknown, Self::Resources),
            ["apis", group, VERSION, rest @ ..] => {
                known_group(group).map_or(Self::Unknown, |group| Self::objects(group, rest))
            }
            _ => Self::Unknown,
        }
    }

    fn objects(group: &'static str, segments: &[&str]) -> Self {
        let (namespace, segments) = match segments {
            ["namespaces", namespace, plural, rest @ ..]
                if Kind::find(group, plural).is_some_and(|kind| kind.namespaced) =>
            {
                let mut tail = vec![*plural];
                tail.extend(rest);
                (Some((*namespace).to_owned()), tail)
            }
            segments => (None, segments.to_vec()),
        };
        let (plural, name, subresource) = match segments.as_slice() {
            [plural] => (plural, None, None),
            [plural, name] => (plural, Some(*name), None),
            [plural, name, sub] => (plural, Some(*name), Some(*sub)),
            _ => return Self::Unknown,
        };
        let Some(kind) = Kind::find(group, plural) else {
            return Self::Unknown;
        };
        // A single object of a namespaced kind exists only inside its namespace.
        if kind.namespaced && namespace.is_none() && name.is_some() {
            return Self::Unknown;
        }
        Self::Objects(Address {
            kind,
            namespace,
            name: name.map(str::to_owned),
            subresource: subresource.map(str::to_owned),
        })
    }
}

fn known_group(group: &str) -> Option<&'static str> {
    groups().into_iter().find(|known| *known == group)
}
