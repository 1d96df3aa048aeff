{{- /* The name of an image: {{ include "culvert.image" (list . "tunnel-server") }}. */}}
{{- define "culvert.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- printf "%s%s:%s" $image.prefix (index . 1) ($image.tag | default $root.Chart.AppVersion) -}}
{{- end }}

{{- /* The addresses that agents dial. Server and agents exit with 64 and this text without one. */}}
{{- define "culvert.advertise" -}}
{{- join "," .Values.advertise | default "the address in ConfigMap tunnel-agent is not set" -}}
{{- end }}
