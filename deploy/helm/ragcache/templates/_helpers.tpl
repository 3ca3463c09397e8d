{{- define "ragcache.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 50 characters: KubeRay adds the names of its own resources. */}}
{{- define "ragcache.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "ragcache.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "ragcache.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "ragcache.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ragcache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ragcache.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "ragcache.selectorLabels" . }}
{{- end }}

{{- define "ragcache.podMetadata" -}}
labels:
  {{- include "ragcache.selectorLabels" . | nindent 2 }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ragcache.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "ragcache.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "ragcache.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{/* The Secret of a value: one that exists, or the chart's. */}}
{{- define "ragcache.secretOf" -}}
{{- .given.existingSecret.name | default (include "ragcache.fullname" .root) }}
{{- end }}

{{- define "ragcache.hasLedger" -}}
{{- if or .Values.ledger.url .Values.ledger.existingSecret.name }}yes{{ end }}
{{- end }}

{{- define "ragcache.hasSeveral" -}}
{{- if or (eq .Values.mode "ray") .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}yes{{ end }}
{{- end }}

{{/* Fails where the values cannot work together. */}}
{{- define "ragcache.check" -}}
{{- if include "ragcache.hasSeveral" . }}
{{- if not (and (include "ragcache.hasLedger" .) .Values.remote.url) }}
{{- fail "several replicas share a ledger and a remote tier: set ledger.url (or ledger.existingSecret.name) and remote.url" }}
{{- end }}
{{- if .Values.persistence.existingClaim }}
{{- fail "persistence.existingClaim is for a single service: several replicas have a volume each" }}
{{- end }}
{{- end }}
{{- if and (eq .Values.mode "ray") .Values.autoscaling.enabled }}
{{- fail "autoscaling is for mode `service`: in mode `ray`, ray.minReplicas and ray.maxReplicas bound the replicas" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.enabled needs ingress.host" }}
{{- end }}
{{- end }}

{{/* The text of a setting: lists with commas, whole numbers without an exponent. */}}
{{- define "ragcache.setting" -}}
{{- if kindIs "slice" . }}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{/* Settings by name, with the chart's own. */}}
{{- define "ragcache.settings" -}}
{{- $settings := dict "host" "0.0.0.0" "port" "8000" "state" "/var/lib/ragcache/state" }}
{{- if gt (int .Values.gpu.count) 0 }}
{{- $_ := set $settings "device" "cuda" }}
{{- end }}
{{- if .Values.remote.url }}
{{- $_ := set $settings "remote" .Values.remote.url }}
{{- end }}
{{- if eq .Values.mode "ray" }}
{{- $_ := set $settings "autoscale" (printf "%d-%d" (int .Values.ray.minReplicas) (int .Values.ray.maxReplicas)) }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $settings $name (include "ragcache.setting" $value) }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- define "ragcache.fromSecret" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end }}

{{/* Variables of what is secret, and of what libraries read. */}}
{{- define "ragcache.env" -}}
{{- if include "ragcache.hasLedger" . }}
{{ include "ragcache.fromSecret" (dict "name" "RAGCACHE_LEDGER" "secret" (include "ragcache.secretOf" (dict "root" . "given" .Values.ledger)) "key" .Values.ledger.existingSecret.key) }}
{{- end }}
{{- with .Values.remote }}
{{- if or .accessKeyId .existingSecret.name }}
{{- $secret := include "ragcache.secretOf" (dict "root" $ "given" .) }}
{{ include "ragcache.fromSecret" (dict "name" "AWS_ACCESS_KEY_ID" "secret" $secret "key" .existingSecret.accessKeyIdKey) }}
{{ include "ragcache.fromSecret" (dict "name" "AWS_SECRET_ACCESS_KEY" "secret" $secret "key" .existingSecret.secretAccessKeyKey) }}
{{- end }}
{{- with .endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with .region }}
- name: AWS_DEFAULT_REGION
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.huggingFace }}
{{- if or .token .existingSecret.name }}
{{ include "ragcache.fromSecret" (dict "name" "HF_TOKEN" "secret" (include "ragcache.secretOf" (dict "root" $ "given" .)) "key" .existingSecret.key) }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Makes the operator's key before the first start: without any key the service refuses to listen
to other machines. */}}
{{- define "ragcache.keyContainer" -}}
- name: operator-key
  image: {{ include "ragcache.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [ragcache, keys, create, operator, --role, admin, --secret-file, /run/secrets/ragcache/operator-key]
  {{- with include "ragcache.env" . | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 1Gi}
  volumeMounts:
    - name: operator-key
      mountPath: /run/secrets/ragcache
      readOnly: true
    {{- include "ragcache.volumeMounts" . | nindent 4 }}
{{- end }}

{{- define "ragcache.keyVolume" -}}
- name: operator-key
  secret:
    secretName: {{ include "ragcache.secretOf" (dict "root" . "given" .Values.operatorKey) }}
    items:
      - key: {{ .Values.operatorKey.existingSecret.key }}
        path: operator-key
{{- end }}

{{- define "ragcache.volumeMounts" -}}
- name: state
  mountPath: /var/lib/ragcache
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "ragcache.claimSpec" -}}
accessModes:
  {{- toYaml .Values.persistence.accessModes | nindent 2 }}
{{- with .Values.persistence.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.persistence.size }}
{{- end }}

{{- define "ragcache.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (int .Values.gpu.count) 0 }}
{{- $gpus := dict .Values.gpu.resource (.Values.gpu.count | int | toString) }}
{{- $resources = mustMergeOverwrite $resources (dict "requests" $gpus "limits" (deepCopy $gpus)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* What every pod has. Links of a Service named ragcache would set RAGCACHE_PORT. */}}
{{- define "ragcache.podSpec" -}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Where pods with a model run. */}}
{{- define "ragcache.placement" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
