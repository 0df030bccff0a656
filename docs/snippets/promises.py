import mcbn
from mcbn.baselines import Temperature
from trained import diabetes, digits

net, train_loader, (x_val, y_val), (x, y) = diabetes()
bayes = mcbn.MCBN(net, "regression").fit(train_loader, n_samples=100)
bayes.tune((x_val[:32], y_val[:32]))
bayes.calibrate((x_val[32:], y_val[32:]), level=0.9)  # other rows than those of tune
low, high = bayes.predict(x).interval()
print(f"inside the 90 % interval: {((low < y) & (y < high)).float().mean():.0%} of {len(y)}")

net, train_loader, (x_val, y_val), (x, y) = digits()
bayes = mcbn.MCBN(net, "classification").fit(train_loader, n_samples=30)
bayes.calibrate((x_val, y_val), level=0.99)
pred = bayes.predict(x)
sets = pred.set()  # (N, K), boolean
covered = sets.gather(1, y[:, None]).float().mean()
print(f"true digit in the 99 % set: {covered:.0%}; digits in a set: {sets.sum(1).float().mean():.2f}")

ask = pred.reject(risk=0.05)  # errors among the others stay below 5 %, with probability 0.9
wrong = (pred.label != y)[~ask].float().mean()
print(f"left to a human: {ask.float().mean():.0%}; errors among the others: {wrong:.1%}")

scaled = Temperature(net, "classification").tune((x_val[:100], y_val[:100]))
scaled.calibrate((x_val[100:], y_val[100:]), level=0.99)
print(f"digits in a set of the plain network, temperature tuned: {scaled.predict(x).set().sum(1).float().mean():.2f}")

chosen = mcbn.decide.batch_bald(bayes.sample(x[:100]), k=5)
print(f"labels of {len(chosen.indices)} inputs would tell {chosen.information[-1]:.2f} nats about the draws")
