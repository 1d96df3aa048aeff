// Prints what the router of the kubelet does with the spellings of spellings.txt: the table of
// tunnel-server/routing/src/operation/kubelet_router.tsv. net/http and go-restful are the real ones; the
// registrations and the subresources are those of Kubernetes pkg/kubelet/server/server.go and auth.go
// (1.35, with all features), with a handler that answers its name.
//
// Needs github.com/emicklei/go-restful/v3 below vendor/, as in a clone of Kubernetes. Run:
//
//	go run -mod=vendor . <spellings.txt >../../tunnel-server/routing/src/operation/kubelet_router.tsv
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"

	restful "github.com/emicklei/go-restful/v3"
)

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go http.Serve(listener, router())
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		method, target, _ := strings.Cut(lines.Text(), " ")
		fmt.Printf("%s\t%s\t%s\n", method, target, ask(listener.Addr().String(), method, target))
	}
}

// ask sends a request with exactly this target, and returns the handler and the subresources, or the status.
func ask(address, method, target string) string {
	connection, err := net.Dial("tcp", address)
	if err != nil {
		panic(err)
	}
	defer connection.Close()
	fmt.Fprintf(connection, "%s %s HTTP/1.1\r\nHost: node:10250\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", method, target)
	response, err := http.ReadResponse(bufio.NewReader(connection), nil)
	if err != nil {
		panic(err)
	}
	io.Copy(io.Discard, response.Body)
	if name := response.Header.Get("Handler"); name != "" {
		return name
	}
	return fmt.Sprint(response.StatusCode)
}

func router() http.Handler {
	container := restful.NewContainer()
	answer := func(name string, writer http.ResponseWriter, request *http.Request) {
		writer.Header().Set("Handler", name+"\t"+strings.Join(subresources(request.URL.Path), ","))
	}
	handle := func(name string, paths ...string) {
		for _, path := range paths {
			container.Handle(path, http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
				answer(name, writer, request)
			}))
		}
	}
	service := func(name, root string, methods string, paths ...string) {
		ws := new(restful.WebService)
		ws.Path(root)
		for _, path := range paths {
			for _, method := range strings.Fields(methods) {
				ws.Route(ws.Method(method).Path(path).To(func(request *restful.Request, response *restful.Response) {
					answer(name, response.ResponseWriter, request.Request)
				}))
			}
		}
		container.Add(ws)
	}
	pod, uid := "/{podNamespace}/{podID}", "/{podNamespace}/{podID}/{uid}"
	handle("healthz", "/healthz", "/healthz/ping", "/healthz/log", "/healthz/syncloop")
	handle("metrics", "/metrics/slis")
	service("pods", "/pods", "GET", "")
	service("stats", "/stats/", "GET POST", "/summary")
	handle("metrics", "/metrics", "/metrics/cadvisor", "/metrics/resource", "/metrics/probes")
	service("nodelogs", "/logs/", "GET", "", "/{logpath:*}")
	service("debug", "/debug/pprof/", "GET", "/{subpath:*}")
	handle("debug", "/debug/flags/v")
	service("run", "/run", "POST", pod+"/{containerName}", uid+"/{containerName}")
	service("exec", "/exec", "GET POST", pod+"/{containerName}", uid+"/{containerName}")
	service("attach", "/attach", "GET POST", pod+"/{containerName}", uid+"/{containerName}")
	service("portforward", "/portForward", "GET POST", pod, uid)
	service("containerlogs", "/containerLogs", "GET", pod+"/{containerName}")
	handle("configz", "/configz")
	service("pods", "/runningpods/", "GET", "")
	service("checkpoint", "/checkpoint/", "POST", pod+"/{containerName}")
	handle("configz", "/flagz")
	handle("statusz", "/statusz")
	return container
}

// isSubpath and subresources are those of auth.go, with KubeletFineGrainedAuthz.
func isSubpath(subpath, path string) bool {
	path = strings.TrimSuffix(path, "/")
	return subpath == path || (strings.HasPrefix(subpath, path) && subpath[len(path)] == '/')
}

func subresources(path string) (found []string) {
	switch {
	case isSubpath(path, "/pods"), isSubpath(path, "/runningpods/"):
		found = append(found, "pods")
	case isSubpath(path, "/healthz"):
		found = append(found, "healthz")
	case isSubpath(path, "/configz"):
		found = append(found, "configz")
	}
	switch {
	case isSubpath(path, "/stats/"):
		return append(found, "stats")
	case isSubpath(path, "/metrics"):
		return append(found, "metrics")
	case isSubpath(path, "/logs/"):
		return append(found, "log")
	case isSubpath(path, "/checkpoint/"):
		return append(found, "checkpoint")
	case isSubpath(path, "/statusz"):
		return append(found, "statusz")
	case isSubpath(path, "/flagz"):
		return append(found, "configz")
	}
	return append(found, "proxy")
}
