#!/usr/bin/env bash
# Requests the client certificate with which the server calls kubelets, and stores it in the Secret
# that the manifests mount. A running server loads a new certificate within about a minute. Run this
# again before the certificate expires, by default after a year.
#
#   deploy/kubelet-certificate.sh
#
#   NAMESPACE=kube-system   namespace of the server
#   KUBECTL=kubectl         the program that calls the API server
#
# The certificate is for the user culvert-tunnel-server, who gets the ClusterRole
# system:kubelet-api-admin and no other right. You need the rights to approve requests of the signer
# kubernetes.io/kube-apiserver-client (deploy/examples/certificate-approver.yaml), to bind that role,
# and to write Secrets in the namespace. The key is created here, and stored in the Secret only.
set -euo pipefail
umask 077

fail() { echo "kubelet-certificate: $*" >&2; exit 1; }

kubectl=${KUBECTL:-kubectl}
namespace=${NAMESPACE:-kube-system}
user=culvert-tunnel-server
request=culvert-kubelet-client
secret=tunnel-kubelet-client
for program in "$kubectl" openssl base64; do
  command -v "$program" >/dev/null || fail "needs $program"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$user" \
  -keyout "$work/tls.key" -out "$work/request.pem" 2>"$work/openssl" || fail "openssl: $(cat "$work/openssl")"

# A request that an earlier run has left is for another key.
"$kubectl" delete csr "$request" --ignore-not-found --wait=false
"$kubectl" create -f - <<END
apiVersion: certificates.k8s.io/v1
kind: CertificateSigningRequest
metadata:
  name: $request
spec:
  signerName: kubernetes.io/kube-apiserver-client
  usages: ["digital signature", "client auth"]
  request: $(base64 <"$work/request.pem" | tr -d '\n')
END
"$kubectl" certificate approve "$request"
certificate=
for _ in $(seq 60); do
  certificate=$("$kubectl" get csr "$request" -o 'jsonpath={.status.certificate}')
  [ -z "$certificate" ] || break
  sleep 1
done
[ -n "$certificate" ] || fail "no certificate within 60 s; '$kubectl describe csr $request' may have the reason, and the cluster may not sign for kubernetes.io/kube-apiserver-client"
base64 -d <<<"$certificate" >"$work/tls.crt"

if ! "$kubectl" get clusterrolebinding "$user" >/dev/null 2>&1; then
  "$kubectl" create clusterrolebinding "$user" --clusterrole=system:kubelet-api-admin --user="$user"
fi
# Not with `apply`, which would copy the key to an annotation.
verb=create
if "$kubectl" -n "$namespace" get secret "$secret" >/dev/null 2>&1; then verb=replace; fi
"$kubectl" -n "$namespace" create secret tls "$secret" --cert="$work/tls.crt" --key="$work/tls.key" --dry-run=client -o yaml |
  "$kubectl" -n "$namespace" "$verb" -f -
"$kubectl" delete csr "$request" --ignore-not-found --wait=false
openssl x509 -in "$work/tls.crt" -noout -enddate | sed "s/^notAfter=/kubelet-certificate: expires /"
