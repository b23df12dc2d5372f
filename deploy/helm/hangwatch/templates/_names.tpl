{{- define "hangwatch.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "hangwatch.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "hangwatch.name" .) .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name (include "hangwatch.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "hangwatch.selector" -}}
app.kubernetes.io/name: {{ include "hangwatch.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hangwatch.labels" -}}
{{ include "hangwatch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The scrape of a PodMonitor or ServiceMonitor. Both take interval, timeout and access from podMonitor. */}}
{{- define "hangwatch.scrape" -}}
{{- if gt (include "hangwatch.milliseconds" .Values.podMonitor.scrapeTimeout | int64) (include "hangwatch.milliseconds" .Values.podMonitor.interval | int64) }}
{{- fail (printf "podMonitor.scrapeTimeout=%s is longer than podMonitor.interval=%s: the Prometheus operator takes no such PodMonitor, and nothing would be scraped" .Values.podMonitor.scrapeTimeout .Values.podMonitor.interval) }}
{{- end -}}
- port: metrics
  path: /metrics
  {{- with .Values.podMonitor.endpoint }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  interval: {{ .Values.podMonitor.interval }}
  scrapeTimeout: {{ .Values.podMonitor.scrapeTimeout }}
  relabelings:
    # The rules select this scrape job, whatever the name of the release.
    - action: replace
      targetLabel: job
      replacement: hangwatch
    # A node keeps its name when its pod is replaced, so series and alerts continue.
    - action: replace
      sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: instance
    - action: labeldrop
      regex: pod|container|endpoint|service
{{- end }}

{{- define "hangwatch.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "hangwatch.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "hangwatch.appArmorAnnotation" -}}
{{- $profile := .Values.appArmorProfile -}}
{{- if eq $profile.type "Localhost" -}}
localhost/{{ $profile.localhostProfile }}
{{- else -}}
{{ ternary "unconfined" "runtime/default" (eq $profile.type "Unconfined") }}
{{- end }}
{{- end }}

{{- /* Without a health port, the daemon uses the port after that of /metrics. */}}
{{- define "hangwatch.healthPort" -}}
{{- int (default (add1 .Values.config.http.port) .Values.config.http.health_port) }}
{{- end }}

{{- /* A name without a registry would be pulled from Docker Hub, where it may have another owner. */}}
{{- define "hangwatch.image" -}}
{{- $image := .Values.image -}}
{{- if not $image.repository -}}
{{ fail "image.repository is empty, and no image of hangwatch is published: build one with `make image`, push it, and --set image.repository=REGISTRY/hangwatch" }}
{{- else if not (or (contains "/" $image.repository) (eq $image.pullPolicy "Never")) -}}
{{ fail (printf "image.repository=%s names no registry: REGISTRY/%s, or image.pullPolicy=Never where the nodes have it" $image.repository $image.repository) }}
{{- else if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) }}
{{- end }}
{{- end }}

{{- /* A duration of the schema's form, 500ms, 5s or 1m, in milliseconds. */}}
{{- define "hangwatch.milliseconds" -}}
{{- if hasSuffix "ms" . }}{{ trimSuffix "ms" . }}{{ else if hasSuffix "s" . }}{{ mul 1000 (trimSuffix "s" . | int64) }}{{ else }}{{ mul 60000 (trimSuffix "m" . | int64) }}{{ end }}
{{- end }}
