//! In a cluster: records, ports and the Lease through the API; against a stand-in, and a real kube-apiserver where its
//! binaries are.

mod kubectl;
