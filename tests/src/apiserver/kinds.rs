//! The served kinds of objects, and the routing of paths.

/// One kind of object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) kind: &'static str,
    pub(super) short: &'static [&'static str],
    pub(super) namespaced: bool,
    /// Whether status has a path of its own.
    pub(super) has_status: bool,
    /// Whether PUT may create the object.
    pub(super) created_by_update: bool,
    /// Whether `metadata.generation` counts changes of the spec.
    pub(super) has_generation: bool,
}

/// Version of all served kinds.
pub(super) const VERSION: &str = "v1";

const PLAIN: Kind = Kind {
    group: "",
    plural: "",
    kind: "",
    short: &[],
    namespaced: true,
    has_status: false,
    created_by_update: false,
    has_generation: false,
};

const fn core(plural: &'static str, kind: &'static str, short: &'static [&'static str]) -> Kind {
    Kind {
        plural,
        kind,
        short,
        ..PLAIN
    }
}

const fn of(group: &'static str, plural: &'static str, kind: &'static str) -> Kind {
    Kind {
        group,
        plural,
        kind,
        ..PLAIN
    }
}

const RBAC: &str = "rbac.authorization.k8s.io";

/// The served kinds, in the order of discovery.
pub(super) static KINDS: [Kind; 26] = [
    Kind {
        namespaced: false,
        has_status: true,
        ..core("namespaces", "Namespace", &["ns"])
    },
    Kind {
        namespaced: false,
        has_status: true,
        ..core("nodes", "Node", &["no"])
    },
    Kind {
        has_status: true,
        ..core("pods", "Pod", &["po"])
    },
    Kind {
        has_status: true,
        created_by_update: true,
        ..core("services", "Service", &["svc"])
    },
    Kind {
        created_by_update: true,
        ..core("endpoints", "Endpoints", &["ep"])
    },
    core("configmaps", "ConfigMap", &["cm"]),
    core("secrets", "Secret", &[]),
    core("serviceaccounts", "ServiceAccount", &["sa"]),
    Kind {
        created_by_update: true,
        ..core("events", "Event", &["ev"])
    },
    Kind {
        has_status: true,
        has_generation: true,
        short: &["deploy"],
        ..of("apps", "deployments", "Deployment")
    },
    Kind {
        has_status: true,
        has_generation: true,
        short: &["ds"],
        ..of("apps", "daemonsets", "DaemonSet")
    },
    Kind {
        has_status: true,
        has_generation: true,
        short: &["rs"],
        ..of("apps", "replicasets", "ReplicaSet")
    },
    Kind {
        created_by_update: true,
        ..of("coordination.k8s.io", "leases", "Lease")
    },
    Kind {
        created_by_update: true,
        ..of(RBAC, "roles", "Role")
    },
    Kind {
        created_by_update: true,
        ..of(RBAC, "rolebindings", "RoleBinding")
    },
    Kind {
        created_by_update: true,
        namespaced: false,
        ..of(RBAC, "clusterroles", "ClusterRole")
    },
    Kind {
        created_by_update: true,
        namespaced: false,
        ..of(RBAC, "clusterrolebindings", "ClusterRoleBinding")
    },
    Kind {
        created_by_update: true,
        ..of("discovery.k8s.io", "endpointslices", "EndpointSlice")
    },
    Kind {
        namespaced: false,
        has_status: true,
        ..of("networking.k8s.io", "servicecidrs", "ServiceCIDR")
    },
    Kind {
        created_by_update: true,
        short: &["ev"],
        ..of("events.k8s.io", "events", "Event")
    },
    Kind {
        has_status: true,
        has_generation: true,
        short: &["pdb"],
        ..of("policy", "poddisruptionbudgets", "PodDisruptionBudget")
    },
    Kind {
        has_generation: true,
        short: &["netpol"],
        ..of("networking.k8s.io", "networkpolicies", "NetworkPolicy")
    },
    Kind {
        namespaced: false,
        has_generation: true,
        short: &["pc"],
        ..of("scheduling.k8s.io", "priorityclasses", "PriorityClass")
    },
    Kind {
        namespaced: false,
        ..of(
            "authorization.k8s.io",
            "selfsubjectaccessreviews",
            "SelfSubjectAccessReview",
        )
    },
    Kind {
        namespaced: false,
        ..of("authentication.k8s.io", "tokenreviews", "TokenReview")
    },
    Kind {
        namespaced: false,
        has_status: true,
        short: &["csr"],
        ..of(
            "certificates.k8s.io",
            "certificatesigningrequests",
            "CertificateSigningRequest",
        )
    },
];

impl Kind {
    /// Returns the kind with this plural name in this group.
    pub(super) fn find(group: &str, plural: &str) -> Option<&'static Self> {
        KINDS
            .iter()
            .find(|kind| kind.group == group && kind.plural == plural)
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

    /// Returns whether `approval` is another path for the status, for its conditions only.
    pub(super) fn is_approved(&self) -> bool {
        self.kind == "CertificateSigningRequest"
    }

    /// Returns the storage name: events of both groups are one set of objects.
    pub(super) fn storage(&self) -> &'static str {
        self.plural
    }
}

/// Returns the groups other than the core group, each once.
pub(super) fn groups() -> Vec<&'static str> {
    let mut groups = Vec::new();
    for kind in &KINDS {
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
    /// `/apis/apps`: one group and its versions.
    Group(&'static str),
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
            ["apis", group] => known_group(group).map_or(Self::Unknown, Self::Group),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn address(path: &str) -> Address {
        match ApiRoute::of(path) {
            ApiRoute::Objects(address) => address,
            other => panic!("{path}: {other:?}"),
        }
    }

    #[test]
    fn paths_name_collections_objects_and_parts_of_them() {
        let node = address("/api/v1/nodes/worker-1/status");
        assert_eq!(
            (
                node.kind.kind,
                node.name.as_deref(),
                node.subresource.as_deref()
            ),
            ("Node", Some("worker-1"), Some("status"))
        );
        let leases = address("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases");
        assert_eq!(
            (leases.kind.kind, leases.namespace.as_deref(), leases.name),
            ("Lease", Some("kube-system"), None)
        );
        let namespace = address("/api/v1/namespaces/kube-system");
        assert_eq!(
            (namespace.kind.kind, namespace.name.as_deref()),
            ("Namespace", Some("kube-system"))
        );
        let everywhere = address("/api/v1/configmaps");
        assert_eq!((everywhere.namespace, everywhere.name), (None, None));
        assert_eq!(ApiRoute::of("/api/v1/configmaps/x"), ApiRoute::Unknown);
        assert_eq!(
            ApiRoute::of("/apis/example.org/v1/things"),
            ApiRoute::Unknown
        );
        assert_eq!(ApiRoute::of("/apis/apps/v1"), ApiRoute::Resources("apps"));
    }
}
