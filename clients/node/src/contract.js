// The published contract: the service as proto-loader reads it, limits, and values of google.protobuf.Struct.

import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

export const MIB = 1 << 20;
export const MAX_MESSAGE_BYTES = 4 * MIB;
export const MAX_METRICS = 256;
export const METRIC_NAME = /^[A-Za-z0-9_./-]{1,128}$/;
export const TAG = /^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$/;

// Beside the package where it was published, in the repository otherwise.
const ROOTS = ['../protos/', '../../../protos/'].map((path) => fileURLToPath(new URL(path, import.meta.url)));

const definition = protoLoader.loadSync('rollwire/v1/environment.proto', {
  includeDirs: ROOTS.filter(existsSync),
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});

export const EnvironmentService = grpc.loadPackageDefinition(definition).rollwire.v1.EnvironmentService;

const attach = EnvironmentService.service.Attach;

/** Returns the size of an AttachRequest in bytes. */
export function messageBytes(message) {
  return attach.requestSerialize(message).length;
}

export const CHANNEL_OPTIONS = {
  'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
  'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
  'grpc.keepalive_time_ms': 30_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.keepalive_permit_without_calls': 1,
  'grpc.initial_reconnect_backoff_ms': 200,
  'grpc.max_reconnect_backoff_ms': 5_000,
  'grpc.enable_http_proxy': 0,
};

/** Returns a google.protobuf.Struct for a plain object. */
export function toStruct(object) {
  return { fields: Object.fromEntries(Object.entries(object).map(([name, value]) => [name, toValue(value)])) };
}

function toValue(value) {
  if (value === null || value === undefined) return { nullValue: 0 };
  if (typeof value === 'number') return { numberValue: value };
  if (typeof value === 'string') return { stringValue: value.toWellFormed() };
  if (typeof value === 'boolean') return { boolValue: value };
  if (Array.isArray(value)) return { listValue: { values: value.map(toValue) } };
  return { structValue: toStruct(value) };
}

/** Returns a plain object for a google.protobuf.Struct. */
export function fromStruct(struct) {
  return Object.fromEntries(Object.entries(struct?.fields ?? {}).map(([name, value]) => [name, fromValue(value)]));
}

function fromValue(value) {
  if (value.kind === 'structValue') return fromStruct(value.structValue);
  if (value.kind === 'listValue') return value.listValue.values.map(fromValue);
  return value.kind === 'nullValue' ? null : value[value.kind];
}

/** Returns a google.protobuf.Duration in milliseconds. */
export function durationMs(duration) {
  return Number(duration?.seconds ?? 0) * 1000 + (duration?.nanos ?? 0) / 1e6;
}
